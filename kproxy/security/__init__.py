"""Security of connections: TLS, SASL towards brokers, the PROXY protocol.

Decisions are pure (`proxy_protocol`, `tls_errors`, `sasl_client`); `reloading` reads files, `broker_access` is what
every connection to a broker begins with.
"""
