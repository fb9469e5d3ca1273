"""Who a client is, what it may do and how much of it: SASL, principals, ACLs, quotas.

Everything here decides and does no I/O, except that users, keys and rules are read from files (`files`).
`kproxy.proxy.admission` and `kproxy.proxy.access` carry out what is decided.
"""
