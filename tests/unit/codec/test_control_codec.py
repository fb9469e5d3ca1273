"""The adapter over kafka-python's codecs reads and writes correct bytes, and raises a CodecError for others."""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from io import BytesIO
from typing import Any

import pytest
from kio.index import load_payload_module
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType

from kproxy_codec import api_keys, control
from kproxy_codec.errors import CodecError, InvalidField, UnsupportedVersion
from kproxy_codec.primitives import encode_tagged_fields, encode_uvarint

TOPIC_ID = uuid.UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")


def _metadata_fields(version: int) -> dict[str, Any]:
    partition = {"error_code": 0, "partition_index": 3, "leader_id": 1, "replica_nodes": [1, 2], "isr_nodes": [1]}
    topic: dict[str, Any] = {"error_code": 0, "name": "flights", "is_internal": False, "partitions": [partition]}
    fields: dict[str, Any] = {"brokers": [{"node_id": 1, "host": "h", "port": 9}], "topics": [topic]}
    if version >= 1:
        fields["controller_id"] = 1
    if version >= 2:
        fields["cluster_id"] = "c"
    if version >= 7:
        partition["leader_epoch"] = 4
    if version >= 10:
        topic["topic_id"] = TOPIC_ID
    return fields


Case = tuple[str, int, int, dict[str, Any]]

_CREATED = {"name": "t", "num_partitions": 3, "replication_factor": 1, "assignments": [], "configs": []}
_LISTED = [{"name": "t", "partitions": [{"partition_index": 0, "timestamp": -1}]}]
_FETCHED = [{"topic": "t", "partitions": [{"partition": 0, "fetch_offset": 7, "partition_max_bytes": 1 << 20}]}]
_DESCRIBED = {"brokers": [{"broker_id": 1, "host": "h", "port": 9}], "cluster_id": "c", "controller_id": 1}
_SOFTWARE = {"client_software_name": "spark", "client_software_version": "4.0.0"}
_CURSOR = {"topic_name": "t", "partition_index": 9}

# The messages of this project's brokers, proxies and clients: kind, API key, versions, fields.
_TABLE: list[tuple[str, int, range, dict[str, Any]]] = [
    ("request", api_keys.METADATA, range(14), {"topics": [{"name": "flights"}]}),
    ("request", api_keys.API_VERSIONS, range(3, 5), _SOFTWARE),
    ("response", api_keys.API_VERSIONS, range(3), {"api_keys": [{"api_key": 18, "max_version": 4}]}),
    ("request", api_keys.INIT_PRODUCER_ID, range(6), {"transactional_id": None, "transaction_timeout_ms": 60_000}),
    ("response", api_keys.INIT_PRODUCER_ID, range(6), {"producer_id": 2**40, "producer_epoch": 0}),
    ("request", api_keys.CREATE_TOPICS, range(2, 8), {"topics": [_CREATED], "timeout_ms": 5}),
    ("response", api_keys.CREATE_TOPICS, range(2, 8), {"topics": [{"name": "t", "error_code": 36}]}),
    ("response", api_keys.DESCRIBE_CLUSTER, range(2), _DESCRIBED),
    ("request", api_keys.DESCRIBE_TOPIC_PARTITIONS, range(1), {"topics": [{"name": "t"}], "cursor": _CURSOR}),
    ("request", api_keys.DESCRIBE_TOPIC_PARTITIONS, range(1), {"topics": [{"name": "t"}], "cursor": None}),
    ("request", api_keys.LIST_OFFSETS, range(1, 10), {"replica_id": -1, "topics": _LISTED}),
    ("request", api_keys.FETCH, range(4, 13), {"max_wait_ms": 5, "min_bytes": 1, "topics": _FETCHED}),
    ("request", api_keys.FIND_COORDINATOR, range(4), {"key": "group"}),
    ("request", api_keys.FIND_COORDINATOR, range(4, 7), {"coordinator_keys": ["group"]}),
]


def _messages() -> list[Case]:
    cases = [(kind, key, version, fields) for kind, key, versions, fields in _TABLE for version in versions]
    return cases + [("response", api_keys.METADATA, version, _metadata_fields(version)) for version in range(14)]


def _name(case: Case) -> str:
    kind, api_key, version, _ = case
    return f"{api_keys.name_of(api_key)}-v{version}-{kind}"


def _encoded(kind: str, api_key: int, version: int, fields: dict[str, Any]) -> bytes:
    if kind == "request":
        return control.encode_request(control.build_request(api_key, version, **fields))
    return control.encode_response(control.build_response(api_key, version, **fields))


def _decoded(kind: str, api_key: int, version: int, body: bytes | memoryview) -> control.Message:
    decode = control.decode_request if kind == "request" else control.decode_response
    return decode(api_key, version, body)


@pytest.mark.parametrize("case", _messages(), ids=_name)
def test_bytes_agree_with_an_independent_codec(case: Case) -> None:
    kind, api_key, version, _ = case
    body = _encoded(*case)
    name = type(control.build_request(api_key, version)).__name__.removesuffix("Request")
    snake = "".join("_" + letter.lower() if letter.isupper() else letter for letter in name).lstrip("_")
    module = load_payload_module(api_key, version, EntityType.request if kind == "request" else EntityType.response)
    entity_class = getattr(module, name + kind.capitalize())
    assert snake in module.__name__
    entity, read = entity_reader(entity_class)(body, 0)
    assert read == len(body)
    again = BytesIO()
    entity_writer(entity_class)(again, entity)
    assert again.getvalue() == body
    assert _encoded(*case) == control_encode(_decoded(kind, api_key, version, body))


def control_encode(message: control.Message) -> bytes:
    return control.encode_request(message) if message.is_request() else control.encode_response(message)


@pytest.mark.parametrize("case", _messages(), ids=_name)
def test_every_proper_prefix_and_extra_byte_is_refused(case: Case) -> None:
    kind, api_key, version, _ = case
    body = _encoded(*case)
    for length in range(len(body)):
        with pytest.raises(CodecError):
            _decoded(kind, api_key, version, memoryview(body)[:length])
    if (kind, api_key) != ("request", api_keys.METADATA):
        with pytest.raises(CodecError):
            _decoded(kind, api_key, version, body + b"\x00")


def test_librdkafka_metadata_request_for_all_topics_is_read() -> None:
    """librdkafka 2.16.1 sends three bytes too many, which Kafka's broker accepts like this."""
    message = control.decode_request(api_keys.METADATA, 13, bytes.fromhex("00000000010000"))
    assert (message.topics, message.allow_auto_topic_creation) == (None, False)


def test_random_damage_never_raises_anything_but_codec_errors() -> None:
    source = random.Random(20311)
    refused = 0
    for kind, api_key, version, fields in _messages():
        body = bytearray(_encoded(kind, api_key, version, fields))
        for _ in range(60):
            damaged = bytearray(body)
            for _ in range(source.randint(1, 4)):
                damaged[source.randrange(len(damaged))] = source.choice((0, 1, 0x7F, 0x80, 0xFF, source.randrange(256)))
            try:
                _decoded(kind, api_key, version, bytes(damaged))
            except CodecError:
                refused += 1
    assert refused > 100


def test_null_is_refused_where_the_schema_forbids_it() -> None:
    body = _encoded("request", api_keys.FIND_COORDINATOR, 0, {"key": "g"})
    assert body == b"\x00\x01g"
    with pytest.raises(InvalidField, match="key may not be null"):
        control.decode_request(api_keys.FIND_COORDINATOR, 0, b"\xff\xff")
    for api_key, version, field in (
        (api_keys.FIND_COORDINATOR, 4, "coordinator_keys"),
        (api_keys.DELETE_TOPICS, 5, "topic_names"),
    ):
        body = b"\x00\x02\x00\x00" if api_key == api_keys.FIND_COORDINATOR else b"\x02\x00" + bytes(5)
        with pytest.raises(InvalidField, match=f"an element of .*{field} may not be null"):
            control.decode_request(api_key, version, body)
    brokers = [{"node_id": 1, "host": None, "port": 1}]
    answer = control.build_response(api_keys.METADATA, 12, brokers=brokers, topics=[])
    with pytest.raises(InvalidField, match="host may not be null"):
        control.encode_response(answer)


def test_null_is_read_where_the_schema_allows_it() -> None:
    assert control.decode_request(api_keys.METADATA, 1, b"\xff\xff\xff\xff").topics is None
    assert control.decode_request(api_keys.METADATA, 0, b"\x00\x00\x00\x00").topics == []


def test_endless_varint_is_refused_at_once() -> None:
    started = time.thread_time()
    with pytest.raises(InvalidField, match="longer than 32 bits"):
        control.decode_request(api_keys.METADATA, 12, b"\xff" * (1 << 20))
    with pytest.raises(InvalidField, match="in a row"):
        control.decode_response(api_keys.METADATA, 12, b"\xff" * (1 << 20))
    with pytest.raises(CodecError):
        control.decode_request(api_keys.METADATA, 12, b"\xff" * 4096)
    assert time.thread_time() - started < 1.0, "the varint loop ran over the whole message"


def test_huge_array_length_costs_nothing() -> None:
    with pytest.raises(InvalidField):
        control.decode_request(api_keys.METADATA, 1, b"\x7f\xff\xff\xff")
    with pytest.raises(CodecError):
        control.decode_request(api_keys.METADATA, 12, b"\xff\xff\xff\xff\x07")


@pytest.mark.parametrize(
    ("api_key", "version", "before_tags"),
    [(api_keys.API_VERSIONS, 3, b"\x02c\x021"), (api_keys.SASL_AUTHENTICATE, 2, b"\x03ab")],
)
def test_tagged_fields_of_unauthenticated_clients_are_bounded(api_key: int, version: int, before_tags: bytes) -> None:
    """CVE-2026-111115: a tagged field takes two bytes, and much more memory once it is decoded."""
    for count, is_refused in ((0, False), (64, False), (65, True), (30_000, True)):
        section = encode_tagged_fields([(100 + number, b"") for number in range(count)])
        with pytest.raises(InvalidField, match="tagged fields") if is_refused else contextlib.nullcontext():
            control.decode_request(api_key, version, before_tags + section)
    with pytest.raises(CodecError):
        control.decode_request(api_key, version, b"\x7f")


# An empty element of each array that a client may fill, and the bytes before and after the array.
_SMALLEST = {
    "Metadata": (api_keys.METADATA, 9, b"", b"\x01%b", bytes(4)),
    "OffsetCommit": (api_keys.OFFSET_COMMIT, 8, b"\x02g" + bytes(4) + b"\x02m\x00", b"\x02t\x01%b", b"\x00"),
    "OffsetFetch": (api_keys.OFFSET_FETCH, 6, b"\x02g", b"\x02t\x01%b", b"\x00"),
    "JoinGroup": (api_keys.JOIN_GROUP, 6, b"\x02g" + bytes(8) + b"\x01\x00\x02c", b"\x01\x01%b", b"\x00"),
    "LeaveGroup": (api_keys.LEAVE_GROUP, 4, b"\x02g", b"\x01\x00%b", b"\x00"),
    "CreateTopics": (api_keys.CREATE_TOPICS, 7, b"", b"\x02t" + bytes(6) + b"\x01\x01%b", bytes(6)),
    "AddPartitionsToTxn": (api_keys.ADD_PARTITIONS_TO_TXN, 3, b"\x02t" + bytes(10), b"\x02t\x01%b", b"\x00"),
    "DescribeConfigs": (api_keys.DESCRIBE_CONFIGS, 4, b"", b"\x02\x02t\x00%b", bytes(3)),
}


@pytest.mark.parametrize("name", _SMALLEST)
def test_names_in_a_request_are_bounded(name: str) -> None:
    """Each element costs microseconds and some hundred bytes, so 1 MiB of elements cost a second and 150 MB."""
    api_key, version, before, element, behind = _SMALLEST[name]

    def body(count: int, tagged: bytes = b"\x00") -> bytes:
        return before + encode_uvarint(count + 1) + element % tagged * count + behind

    for count in (3, control.MAX_ELEMENTS):
        control.decode_request(api_key, version, body(count))
    started = time.thread_time()
    for tagged in (b"\x00", b"\x01\x63\x00"):
        most = (1 << 20) // len(element % tagged)
        with pytest.raises(InvalidField, match=r"elements; expected at most 32768"):
            control.decode_request(api_key, version, body(most, tagged))
    assert time.thread_time() - started < 0.1
    # The decoder copies the rest of the message for each of these.
    control.decode_request(api_key, version, body(64, b"\x01\x63\x00"))
    with pytest.raises(InvalidField, match=r"tagged fields \(\d+\); expected at most 64"):
        control.decode_request(api_key, version, body(65, b"\x01\x63\x00"))


def test_array_numbers_count_less_than_names() -> None:
    """A new topic may name the replicas of 10,000 partitions, each in an array of its own."""
    replicas = [{"partition_index": index, "broker_ids": [1, 2, 3]} for index in range(10_000)]
    topic = {"name": "t", "num_partitions": -1, "replication_factor": -1, "assignments": replicas, "configs": []}
    body = control.encode_request(control.build_request(api_keys.CREATE_TOPICS, 7, topics=[topic], timeout_ms=1))
    assert len(control.decode_request(api_keys.CREATE_TOPICS, 7, body).topics[0].assignments) == 10_000
    with pytest.raises(InvalidField, match="the request's arrays have"):
        control.decode_request(
            api_keys.ADD_PARTITIONS_TO_TXN,
            0,
            b"\x00\x01t" + bytes(10) + b"\x00\x00\x00\x01\x00\x01t\x00\x09\x00\x00" + bytes(4 * 0x90000),
        )


def test_no_array_is_in_a_tagged_field() -> None:
    """Elements are counted in the fields that are not tagged."""
    for api_key, message_class in control._REQUESTS.items():
        lowest, highest = control.version_range(api_key)
        for version in range(lowest, highest + 1):
            tagged = message_class._struct.tagged_fields(version)._fields
            assert not any(field.is_array() for field in tagged), (api_key, version)


@pytest.mark.parametrize(
    ("api_key", "version"),
    [(api_keys.METADATA, 14), (api_keys.METADATA, -1), (api_keys.PRODUCE, 2), (20311, 0), (4, 0)],
)
def test_unknown_keys_and_versions_are_refused(api_key: int, version: int) -> None:
    with pytest.raises(UnsupportedVersion):
        control.decode_request(api_key, version, b"")


def test_api_versions_error_35_is_read_as_v0() -> None:
    offered = [{"api_key": api_keys.API_VERSIONS, "min_version": 0, "max_version": 4}]
    fields = {"error_code": 35, "api_keys": offered}
    body = control.encode_response(control.build_response(api_keys.API_VERSIONS, 0, **fields))
    answer = control.decode_response(api_keys.API_VERSIONS, 4, body)
    assert (answer.error_code, answer.api_keys[0].max_version) == (35, 4)


def test_invalid_values_raise_invalid_field() -> None:
    with pytest.raises(InvalidField, match="Unrecognized"):
        control.build_response(api_keys.METADATA, 12, cluster_identity="c")
    too_large = control.build_response(api_keys.INIT_PRODUCER_ID, 4, producer_id=2**63)
    with pytest.raises(InvalidField):
        control.encode_response(too_large)
    with pytest.raises(InvalidField, match="is not a request"):
        control.encode_request(control.build_response(api_keys.METADATA, 12))
