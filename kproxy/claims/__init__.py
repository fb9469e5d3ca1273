"""The Own API: claims in etcd, fenced at the brokers (the Kafka wiki's "Single Reader/Writer").

`rules` decides a claim, and `table` holds all claims in etcd. `service` makes claims for the connections of this
process, by the steps in `acquire` and `release`. `client` is for applications.
"""
