"""The Own API (the Kafka wiki's "Single Reader/Writer"): only the client that claimed a resource writes or reads it.

`rules` decides a claim, and `table` holds all claims in etcd. `service` makes claims for the connections of this
process, by the steps in `acquire` and `release`. Applications use `client`. Fences make brokers refuse the writes of
earlier claimants.
"""
