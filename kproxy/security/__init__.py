"""Security: TLS, the PROXY protocol, SASL on both sides, and who a client is, what it may do and how much of it.

Decisions are pure; `reloading` and `files` read files, `broker_access` is what every connection to a broker begins
with. `kproxy.proxy.admission` and `kproxy.proxy.access` carry out what is decided about clients.
"""
