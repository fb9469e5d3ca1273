"""Requests with odd versions, fields, names and numbers get Apache Kafka's answers from the proxy and the brokers.

Each request goes to Apache Kafka directly and through the proxy, and to the reference brokers. Where an answer differs
on purpose, `PROXY_DIFFERS` or `BROKER_DIFFERS` says how and why. A difference that is listed and not seen fails, too.
"""

from __future__ import annotations

import uuid
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from kproxy.broker.apis.registry import OFFERED
from kproxy.proxy.apis import APIS, PART_KEY_TYPES, REQUEST_KEY_TYPES, SERVED
from kproxy_codec import api_keys as keys
from kproxy_codec import error_codes
from kproxy_codec.coordination import GROUP, TRANSACTION
from kproxy_codec.framing import request_header
from tests.contract.asked import ASKED, CLOSED, NEW, NODE, SILENT, TOPIC, TOPIC_ID, UNKNOWN, WRITTEN, Asked
from tests.support.brokers.oracle import NODES, ONE, PATIENCE_S, Side
from tests.support.brokers.reference_broker import Closed, RawClient
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import port_of
from tests.support.waiting import wait_for


class Differs(NamedTuple):
    """The intended answer instead of Kafka's."""

    answer: str
    why: str


# Requests


_NOT_OFFERED = "the API is not offered, and ApiVersions says so"


def not_offered(offered: Container[int]) -> dict[str, Differs]:
    """Requests of APIs that Kafka has but the side does not offer."""
    known = [each for each in ASKED if each.api_key in APIS and each.api_key != keys.SASL_HANDSHAKE]
    return {each.what: Differs(CLOSED, _NOT_OFFERED) for each in known if each.api_key not in offered}


_ONCE = "the answer has each partition once; a client that names one twice would not know what became of which"
_NO_EPOCHS = "no answer of the proxy has a leader epoch, so none of a request can be compared"
_FOLLOWER = "a follower's fetch would move the high watermark; followers have a listener of their own"
_BY_PARTITION = "an answer that may be merged from several brokers has a broker's error in each partition"
_MALFORMED = "a count below -1 is malformed; Kafka takes it for -1"
_KAFKAS_FAULT = "Kafka fails with an internal error"
_A_PROXY = "that broker is a proxy, whose configuration cannot be altered"
_NO_TRANSACTIONS = "the reference brokers keep no transactions, and say so"

PROXY_DIFFERS: Mapping[str, Differs] = {
    **not_offered(SERVED),
    "Produce: a partition twice": Differs("INVALID_REQUEST", _ONCE),
    "Fetch: a later leader epoch": Differs("NONE, NONE", _NO_EPOCHS),
    "Fetch: isolation level 7": Differs("NONE, UNKNOWN_SERVER_ERROR", _BY_PARTITION),
    "Fetch: a follower's replica id": Differs(CLOSED, _FOLLOWER),
    "ListOffsets v6: a later leader epoch": Differs("NONE, offset 1", _NO_EPOCHS),
    "ListOffsets v6: a leader epoch of -7": Differs("NONE, offset 1", _NO_EPOCHS),
    "METADATA: a negative count": Differs(CLOSED, _MALFORMED),
    "AddPartitionsToTxn: as a broker": Differs("UNSUPPORTED_VERSION", "brokers send this version, clients do not"),
    "DescribeLogDirs: all": Differs("NONE, NONE, NONE, NONE", "the proxy tells those of all three brokers"),
    "IncrementalAlterConfigs: the broker that Metadata names": Differs("INVALID_REQUEST", _A_PROXY),
}
BROKER_DIFFERS: Mapping[str, Differs] = {
    **not_offered(OFFERED),
    "ConsumerGroupHeartbeat: an unknown member": Differs(
        "UNSUPPORTED_VERSION", "the reference brokers have no consumer protocol (KIP-848), and say so"
    ),
    "Produce: a partition twice": Differs("INVALID_REQUEST, INVALID_REQUEST", _ONCE),
    "Fetch: max_bytes -1": Differs("NONE, NONE", _KAFKAS_FAULT),
    "Fetch: partition_max_bytes -1": Differs("NONE, NONE", _KAFKAS_FAULT),
    "Fetch: isolation level 7": Differs("NONE, NONE", _KAFKAS_FAULT),
    "Fetch: a follower's replica id": Differs(CLOSED, _FOLLOWER),
    "ListOffsets v6: isolation level 7": Differs("NONE, offset 1", _KAFKAS_FAULT),
    "Metadata: the id of all zeros": Differs("UNKNOWN_TOPIC_ID", _KAFKAS_FAULT),
    "METADATA: a negative count": Differs(CLOSED, _MALFORMED),
    "FindCoordinator: an empty transactional id": Differs("CLUSTER_AUTHORIZATION_FAILED", _NO_TRANSACTIONS),
    "DescribeConfigs: that broker's loggers": Differs("INVALID_REQUEST", "the reference brokers have no such loggers"),
}


# Answers


class Place(NamedTuple):
    """Where requests go: a broker that leads the topic's partition, or the proxy. `names` fill in the fields."""

    port: int
    names: Mapping[Any, Any]
    coordinators: Mapping[int, int]


def place_of(port: int, topic: str) -> Place:
    with RawClient("127.0.0.1", port) as client:
        described = client.metadata(topic, create=False)
        written = client.metadata(written_of(topic), create=False).topics[0]
    node = next(str(broker.node_id) for broker in described.brokers if broker.port == port)
    unused = uuid.uuid4().hex[:10]
    names = {TOPIC: topic, WRITTEN: written.name, TOPIC_ID: written.topic_id, NODE: node}
    names |= {NEW: f"new-{unused}", UNKNOWN: f"unknown-{unused}"}
    return Place(port, names, {kind: coordinator_port(port, kind, names[UNKNOWN]) for kind in (GROUP, TRANSACTION)})


def written_of(topic: str) -> str:
    return f"{topic}-written"


def coordinator_port(port: int, kind: int, key: str) -> int:
    """Wait for the coordinator and return its port; brokers without coordinators are asked themselves."""

    def served() -> int | None:
        with RawClient("127.0.0.1", port) as client:
            [found] = client.request(keys.FIND_COORDINATOR, 4, coordinator_keys=[key], key_type=kind).coordinators
            if found.error_code in (error_codes.INVALID_REQUEST, error_codes.CLUSTER_AUTHORIZATION_FAILED):
                return port
            if found.error_code:
                return None
        with RawClient("127.0.0.1", found.port) as client:
            if kind == GROUP:
                beat = {"group_id": key, "generation_id": 1, "member_id": "nobody"}
                error_code = client.request(keys.HEARTBEAT, 4, **beat).error_code
            else:
                end = {"transactional_id": key, "producer_id": 5, "producer_epoch": 0, "committed": True}
                error_code = client.request(keys.END_TXN, 3, **end).error_code
        is_loading = error_code in (error_codes.COORDINATOR_LOAD_IN_PROGRESS, error_codes.NOT_COORDINATOR)
        return None if is_loading or error_code == error_codes.COORDINATOR_NOT_AVAILABLE else int(found.port)

    found: int = wait_for(served, PATIENCE_S, "a coordinator")
    return found


def port_for(place: Place, asked: Asked) -> int:
    handling = APIS[asked.api_key].handling if asked.api_key in APIS else None
    key_types = {**REQUEST_KEY_TYPES, **PART_KEY_TYPES}
    if handling not in key_types or asked.api_key == keys.INIT_PRODUCER_ID:
        return place.port
    return place.coordinators[key_types[handling]]


def filled(value: Any, names: Mapping[Any, Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: filled(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, names) for each in value]
    return names.get(value, value) if isinstance(value, str) else value


def ask(place: Place, asked: Asked) -> str:
    """The error codes of the answer in order, by name, and the shown values; or CLOSED, SILENT."""
    with RawClient("127.0.0.1", port_for(place, asked)) as client:
        try:
            if asked.body is not None:
                client.send_bytes(request_header(asked.api_key, asked.version, 1, b"raw") + asked.body)
                client.receive_frame()
                return "answered"
            fields = filled(asked.fields, place.names)
            if fields.get("acks") == 0:
                client.send(asked.api_key, asked.version, answered=False, **fields)
                return CLOSED if client.is_closed() else SILENT
            answer = client.request(asked.api_key, asked.version, **fields).to_dict()
        except Closed:
            return CLOSED
    return ", ".join(outcomes(answer, asked.shown)) or "no error code"


def outcomes(part: Any, shown: Sequence[str]) -> Iterator[str]:
    if isinstance(part, Mapping):
        for name, value in part.items():
            if name == "error_code":
                yield error_codes.name_of(value)
            elif name in shown:
                yield f"{name} {value}"
            else:
                yield from outcomes(value, shown)
    elif isinstance(part, list | tuple):
        for each in part:
            yield from outcomes(each, shown)


def await_producer_ids(side: Side, node_id: int) -> None:
    """Wait until a Kafka broker that has just started has producer ids."""

    def gives() -> bool:
        asked = {"transactional_id": None, "transaction_timeout_ms": 60_000}
        return not client.request(keys.INIT_PRODUCER_ID, 0, **asked).error_code

    with side.client(node_id) as client:
        wait_for(gives, PATIENCE_S, "a producer id")


class Answers(NamedTuple):
    """The answers by request."""

    kafka: Mapping[str, str]
    proxy: Mapping[str, str]
    brokers: Mapping[str, str]


def ask_all(place: Place) -> dict[str, str]:
    return {each.what: ask(place, each) for each in ASKED}


@pytest.fixture(scope="module")
def answers(sides: dict[str, Side], proxy: KproxyProcess) -> Answers:
    topic = f"asked-{uuid.uuid4().hex[:10]}"
    for side in sides.values():
        side.create(topic)
        side.create(written_of(topic))
        with side.client(1) as client:
            assert client.produce(topic, 0, ONE).error_code == 0
        for node_id in NODES:
            await_producer_ids(side, node_id)
    ports = [sides["real"].port(1), port_of(proxy), sides["ours"].port(1)]
    with ThreadPoolExecutor(len(ports)) as pool:
        return Answers(*pool.map(ask_all, [place_of(port, topic) for port in ports]))


def differences(kafka: Mapping[str, str], others: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {what: (answer, others[what]) for what, answer in kafka.items() if others[what] != answer}


def test_requests_have_distinct_names() -> None:
    assert len({each.what for each in ASKED}) == len(ASKED) >= 100
    assert PROXY_DIFFERS.keys() | BROKER_DIFFERS.keys() <= {each.what for each in ASKED}


def test_proxy_answers_as_kafka(answers: Answers) -> None:
    seen = differences(answers.kafka, answers.proxy)
    assert seen == {what: (answers.kafka[what], each.answer) for what, each in PROXY_DIFFERS.items()}


def test_reference_brokers_answer_as_kafka(answers: Answers) -> None:
    seen = differences(answers.kafka, answers.brokers)
    assert seen == {what: (answers.kafka[what], each.answer) for what, each in BROKER_DIFFERS.items()}
