"""A small etcd client over grpc.aio, with keys and values, transactions, leases and watches.

No published client has all that kproxy needs: several members, require-leader, progress notifications, fragments, and
errors that report an unknown outcome. Start at `client.py`; `mirror.py` keeps a local copy of a few prefixes current.
"""

from kproxy.etcd.client import EtcdClient, connect
from kproxy.etcd.errors import (
    EtcdDenied,
    EtcdError,
    EtcdMisused,
    EtcdUnavailable,
    LeaseLost,
)
from kproxy.etcd.id_blocks import IdBlocks
from kproxy.etcd.messages import (
    EtcdStatus,
    KeyValue,
    Snapshot,
    TxnCompare,
    TxnOp,
    TxnResult,
    WatchEvent,
    create_revision_is,
    delete_op,
    get_op,
    key_absent,
    lease_is,
    mod_revision_is,
    prefix_unchanged_since,
    put_op,
)
from kproxy.etcd.mirror import PrefixMirror

__all__ = [
    "EtcdClient",
    "EtcdDenied",
    "EtcdError",
    "EtcdMisused",
    "EtcdStatus",
    "EtcdUnavailable",
    "IdBlocks",
    "KeyValue",
    "LeaseLost",
    "PrefixMirror",
    "Snapshot",
    "TxnCompare",
    "TxnOp",
    "TxnResult",
    "WatchEvent",
    "connect",
    "create_revision_is",
    "delete_op",
    "get_op",
    "key_absent",
    "lease_is",
    "mod_revision_is",
    "prefix_unchanged_since",
    "put_op",
]
