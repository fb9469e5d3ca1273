"""Secure connections: TLS, the PROXY protocol, SASL on both sides, and clients' identities, permissions and quotas.

Decisions are pure. `files`, `in_etcd` and `key_server` read data; `tls_acceptor` and `broker_auth` begin connections.
`kproxy.proxy.admission` and `kproxy.proxy.access` carry out the decisions about clients.
"""
