"""Define etcd's messages: protobuf classes for requests, named tuples for results, and the parts of transactions.

The descriptors are in a pool of their own: another library in the same process may have registered etcd's own .proto
files under the same names.

    result = await client.txn([key_absent(key)], success=[put_op(key, b"1", lease_id)], failure=[get_op(key)])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

DESCRIPTORS = Path(__file__).parent / "rpc.binpb"
PACKAGE = "etcdserverpb"


class _Messages:
    """The message classes as attributes, such as `rpc.PutRequest`, made on first use: an import reads no file."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._pool is None:
            self._pool = descriptor_pool.DescriptorPool()
            for file in descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
                self._pool.AddSerializedFile(file.SerializeToString())
        message_class = message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        setattr(self, name, message_class)
        return message_class


rpc: Any = _Messages()


class KeyValue(NamedTuple):
    """A key at some revision. `version` counts its changes since its creation; `lease_id` is 0 for none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease_id: int


class WatchEvent(NamedTuple):
    """A change. A deletion's `kv` holds only the key and, as mod_revision, the revision of the deletion."""

    deleted: bool
    kv: KeyValue


class Pages(Sequence[KeyValue]):
    """Keys and values as etcd sent them, decoded again by each iteration.

    Decoded, a million keys take 300 MiB; encoded, a quarter of that.
    """

    __slots__ = ("_count", "_pages")

    def __init__(self) -> None:
        self._pages: list[bytes] = []
        self._count = 0

    def add(self, response: Any) -> None:
        """Append the keys of one RangeResponse."""
        self._count += len(response.kvs)
        self._pages.append(response.SerializeToString())

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[KeyValue]:
        for page in self._pages:
            for kv in rpc.RangeResponse.FromString(page).kvs:
                yield key_value(kv)

    @overload
    def __getitem__(self, index: int) -> KeyValue: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[KeyValue]: ...
    def __getitem__(self, index: int | slice) -> KeyValue | Sequence[KeyValue]:
        return list(self)[index]


class Snapshot(NamedTuple):
    """The keys at `revision`: one linearizable view of all pages."""

    revision: int
    cluster_id: int
    kvs: Sequence[KeyValue]


class EtcdStatus(NamedTuple):
    """One member's view: `revision` may lag behind the cluster's.

    `leader_id` is 0 if the member knows no leader; `errors` are its alarms, such as a full database.
    """

    cluster_id: int
    member_id: int
    revision: int
    version: str
    leader_id: int
    errors: tuple[str, ...]


class Lease(NamedTuple):
    """A lease with the TTL in seconds that etcd granted, which may be longer than requested."""

    lease_id: int
    ttl_s: int


class TxnResult(NamedTuple):
    """`found` has what each operation of the branch that ran has read; None for an absent key, and for a write.

    `revision` is the store's revision after the transaction.
    """

    succeeded: bool
    revision: int
    cluster_id: int
    found: tuple[KeyValue | None, ...]


def encode_key(key: str) -> bytes:
    """The bytes of a key. Bytes that are not UTF-8 pass through surrogates unchanged."""
    return key.encode("utf-8", "surrogateescape")


def decode_key(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def prefix_end(prefix: str) -> bytes:
    """The first key after every key that begins with `prefix`.

    If there is none, b"\0", which etcd reads as no end.
    """
    stripped = encode_key(prefix).rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\0"


def key_value(kv: Any) -> KeyValue:
    return KeyValue(decode_key(kv.key), kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


def watch_event(event: Any) -> WatchEvent:
    return WatchEvent(event.type == _DELETE, key_value(event.kv))


# enum Event.EventType
_DELETE = 1
# enum Compare.CompareTarget
_CREATE, _MOD, _LEASE = 1, 2, 4
# enum Compare.CompareResult
_LESS = 2


class TxnCompare(NamedTuple):
    """One condition; a transaction takes its success branch if all hold."""

    message: Any


class TxnOp(NamedTuple):
    """One operation. `write`: the operation changes the store, so it must not be repeated blindly."""

    message: Any
    write: bool


def key_absent(key: str) -> TxnCompare:
    return create_revision_is(key, 0)


def create_revision_is(key: str, revision: int) -> TxnCompare:
    return TxnCompare(rpc.Compare(target=_CREATE, key=encode_key(key), create_revision=revision))


def mod_revision_is(key: str, revision: int) -> TxnCompare:
    return TxnCompare(rpc.Compare(target=_MOD, key=encode_key(key), mod_revision=revision))


def prefix_unchanged_since(prefix: str, revision: int) -> TxnCompare:
    """No key that begins with `prefix` was put after `revision`; deletions are not compared."""
    start, end = encode_key(prefix), prefix_end(prefix)
    compare = rpc.Compare(target=_MOD, result=_LESS, key=start, range_end=end, mod_revision=revision + 1)
    return TxnCompare(compare)


def lease_is(key: str, lease_id: int) -> TxnCompare:
    return TxnCompare(rpc.Compare(target=_LEASE, key=encode_key(key), lease=lease_id))


def put_op(key: str, value: bytes, lease_id: int = 0) -> TxnOp:
    return TxnOp(rpc.RequestOp(request_put=rpc.PutRequest(key=encode_key(key), value=value, lease=lease_id)), True)


def get_op(key: str) -> TxnOp:
    return TxnOp(rpc.RequestOp(request_range=rpc.RangeRequest(key=encode_key(key))), False)


def delete_op(key: str) -> TxnOp:
    return TxnOp(rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=encode_key(key))), True)
