"""The reference broker: an on-disk log per partition, owned by lease in etcd, spoken to in Kafka's protocol.

Start at `server.py`. A request goes through `connection.py` and `apis/registry.py` to one file in `apis/`; ownership is
`broker_lease.py` (the lease and its fence), `leases.py` (which partitions) and `take_over.py` (the transaction);
storage is `partition.py`, `log.py`, `segment.py`, `producer_state.py`, `leader_epochs.py`.
"""
