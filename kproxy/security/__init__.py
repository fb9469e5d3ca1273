"""Secure connections: TLS, the PROXY protocol, SASL on both sides, and clients' identities, permissions and quotas.

Decisions are pure. `reloading` and `files` read files, and `broker_auth` begins every connection to a broker.
`kproxy.proxy.admission` and `kproxy.proxy.access` carry out the decisions about clients.
"""
