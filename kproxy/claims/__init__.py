"""The Own API: claims in etcd, fenced at the brokers (the Kafka wiki's "Single Reader/Writer").

`rules` decides a claim, `table` holds all claims as etcd has them, `service` claims for the connections of this
process, `acquire` and `release` do its steps; `client` is for applications.
"""
