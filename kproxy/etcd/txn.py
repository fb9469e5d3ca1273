"""What a transaction is made of: comparisons and operations.

result = await client.txn([key_absent(key)], success=[put_op(key, b"1", lease_id)], failure=[get_op(key)])
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kproxy.etcd.messages import encode_key, prefix_end, rpc

# enum Compare.CompareTarget
_CREATE, _MOD, _VALUE, _LEASE = 1, 2, 3, 4
# enum Compare.CompareResult
_LESS = 2


class TxnCompare(NamedTuple):
    """One condition; a transaction takes its success branch where all hold."""

    message: Any


class TxnOp(NamedTuple):
    """One operation; `write` tells whether repeating it could do anything twice."""

    message: Any
    write: bool


def key_absent(key: str) -> TxnCompare:
    return create_revision_is(key, 0)


def create_revision_is(key: str, revision: int) -> TxnCompare:
    return TxnCompare(rpc.Compare(target=_CREATE, key=encode_key(key), create_revision=revision))


def mod_revision_is(key: str, revision: int) -> TxnCompare:
    return TxnCompare(rpc.Compare(target=_MOD, key=encode_key(key), mod_revision=revision))


def prefix_unchanged_since(prefix: str, revision: int) -> TxnCompare:
    """No key that begins with `prefix` has been put after `revision`; whether one was deleted is not compared."""
    start, end = encode_key(prefix), prefix_end(prefix)
    compare = rpc.Compare(target=_MOD, result=_LESS, key=start, range_end=end, mod_revision=revision + 1)
    return TxnCompare(compare)


def value_is(key: str, value: bytes) -> TxnCompare:
    return TxnCompare(rpc.Compare(target=_VALUE, key=encode_key(key), value=value))


def lease_is(key: str, lease_id: int) -> TxnCompare:
    return TxnCompare(rpc.Compare(target=_LEASE, key=encode_key(key), lease=lease_id))


def put_op(key: str, value: bytes, lease_id: int = 0) -> TxnOp:
    return TxnOp(rpc.RequestOp(request_put=rpc.PutRequest(key=encode_key(key), value=value, lease=lease_id)), True)


def get_op(key: str) -> TxnOp:
    return TxnOp(rpc.RequestOp(request_range=rpc.RangeRequest(key=encode_key(key))), False)


def delete_op(key: str) -> TxnOp:
    return TxnOp(rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=encode_key(key))), True)
