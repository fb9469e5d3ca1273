"""The reference broker: it serves Kafka's protocol and keeps one log on disk for each replica of a partition.

The broker that leads a partition owns it by a key on its lease in etcd.

Start at `server.py`. `connection.py` reads a request and `apis/registry.py` hands it to one file in `apis/`. Ownership:
`broker_lease.py` (the lease and its fence), `election.py` (which broker takes a partition), `replica_manager.py`
(taking and losing partitions), `hosted_replicas.py` (opening and closing them), `lease_txn.py` (the etcd transactions).
Storage: `partition.py`, `log.py`, `segment.py`, `producer_state.py`, `leader_epochs.py`. Replication:
`replication/partition_replication.py` (high watermark and in-sync replicas), `replication/fetchers.py`.
"""
