"""The cost of applying rules to control requests that name as many resources as they can."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from kproxy.observe.metrics import denials_of
from kproxy.proxy import acl_filter, long_answers
from kproxy.proxy.access import AccessControl
from kproxy.proxy.acl_filter import AclFilter
from kproxy.proxy.long_answers import Portions
from kproxy.routing.topology import Topology
from kproxy.security.acls import Acl, Operation, Permissions, Resource, Rules
from kproxy.security.events import SecurityEvents
from kproxy.security.principals import Principal
from kproxy_codec import api_keys as keys
from kproxy_codec.control import build_response, encode_response
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import parse_request_header
from kproxy_codec.produce import parse_produce
from tests.support.clients.raw_client import produce_frame
from tests.support.processes.served import static_proxy
from tests.support.waiting import eventually
from tests.unit.proxy.acl_filters import access_of, acls_of, answered, filter_of, filtered, request


async def test_denied_keys_cost_time_linear_in_number() -> None:
    """Each key was looked up in the list of all denied keys: 20,000 took six seconds of CPU time."""
    names = [f"{number:x}" for number in range(20_000)]
    began = time.process_time()
    asked = {"key_type": 0, "coordinator_keys": names}
    coordinators = (await answered(filter_of(access_of()), keys.FIND_COORDINATOR, 4, **asked)).coordinators
    assert time.process_time() - began < 4
    assert (len(coordinators), {each.error_code for each in coordinators}) == (20_000, {30})


@pytest.mark.parametrize("is_enforced", [True, False])
def test_first_denial_is_logged_and_all_are_counted(is_enforced: bool) -> None:
    """A line for each topic, most of them left out at once, took 50 ms of the event loop for 4,096 topics."""
    counters = Counter[str]()
    client = access_of((), counters, dry_run=not is_enforced)
    frame = memoryview(bytearray(produce_frame({f"t{n}": [0] for n in range(4_096)})))
    parsed = parse_produce(frame, parse_request_header(frame))
    with capture_logs() as lines:
        refused = client.refused_writes(parsed)
    assert len(refused) == (4_096 if is_enforced else 0)
    assert [line["name"] for line in lines] == ["t0"]
    by_name = {"principal.denied.User:ANONYMOUS": 4_096} if is_enforced else {}
    assert counters == {f"access.{'denied' if is_enforced else 'dry_run'}.write.topic": 4_096, **by_name}


def test_denials_name_a_hundred_principals() -> None:
    counters = Counter[str]()
    control = AccessControl(lambda: Rules([]), counters)
    for number in [*range(150), 0]:
        client = control.client()
        client.authenticated(Principal(f"p{number}"))
        client.allows(Operation.WRITE, Resource.TOPIC, "t")
    found = denials_of(counters)
    assert (len(found), found["other"], found["User:p0"], found["User:p99"]) == (101, 50, 2, 1)


@pytest.mark.parametrize(("owned", "code"), [("x", None), ("y", 53)])
def test_transactional_writes_need_right_to_id(owned: str, code: int | None) -> None:
    kinds = ((Resource.TOPIC, "t"), (Resource.TRANSACTIONAL_ID, owned))
    frame = memoryview(bytearray(produce_frame({"t": [0, 1]}, transactional_id="x")))
    client = access_of((Operation.WRITE, kind, name) for kind, name in kinds)
    refused = client.refused_writes(parse_produce(frame, parse_request_header(frame)))
    assert refused == ({} if code is None else {(0, 0): code, (0, 1): code})


async def test_api_with_unplaced_needs_is_refused() -> None:
    """The row says where a request has its topics; otherwise brokers would get it with the proxy's identity."""
    with pytest.raises(CodecError, match="LIST_OFFSETS is refused, because the proxy has no access rules"):
        await filtered(filter_of(access_of()), keys.LIST_OFFSETS, 5, replica_id=-1, isolation_level=0, topics=[])


async def test_first_denial_of_control_request_is_logged() -> None:
    counters = Counter[str]()
    by, names = filter_of(access_of((), counters)), [f"t{n}" for n in range(10)]
    with capture_logs() as lines:
        await answered(by, keys.DELETE_TOPICS, 5, topic_names=names, timeout_ms=1)
    assert [line["name"] for line in lines] == ["t0"]
    assert counters == {"access.denied.delete.topic": 10, "principal.denied.User:ANONYMOUS": 10}


def test_permissions_change_only_for_affected_clients() -> None:
    """A change forgets the client's routes: rules that change each second would cost all clients all their routes."""

    def written(name: str, *topics: str) -> list[Acl]:
        return acls_of([(Operation.WRITE, Resource.TOPIC, each) for each in topics], name)

    rules = Rules([*written("alice", "a"), *written("bob", "b")])
    control = AccessControl(lambda: rules, Counter())
    alice, bob = control.client(), control.client()
    alice.authenticated(Principal("alice"))
    bob.authenticated(Principal("bob"))
    assert not alice.has_changed()
    rules = Rules([*written("alice", "a"), *written("bob", "b", "c")], rules)
    assert (alice.has_changed(), bob.has_changed()) == (False, True)
    assert (alice.has_changed(), bob.has_changed()) == (False, False)
    assert bob.may_write(b"c")
    rules = Rules([], rules)
    assert alice.has_changed()
    assert not alice.may_write(b"a")


def test_rule_change_during_permission_lookup_counts() -> None:
    """A thread that reads a long request found the earlier permissions, which stayed until the next change."""

    class Slow(Rules):
        def of(self, principal: Principal) -> Permissions:
            found = super().of(principal)
            if threading.current_thread() is not threading.main_thread():
                finds.set()
                changed.wait(10)
            return found

    finds, changed = threading.Event(), threading.Event()
    allowed = acls_of([(Operation.WRITE, Resource.TOPIC, "t")], "alice")
    rules = Rules(allowed)
    client = AccessControl(lambda: rules, Counter()).client()
    client.authenticated(Principal("alice"))
    rules = Slow(allowed)
    thread = threading.Thread(target=client.may_write, args=(b"t",))
    thread.start()
    assert finds.wait(10)
    rules = Rules([])
    assert not client.may_write(b"t")
    changed.set()
    thread.join()
    assert not client.may_write(b"t")


SECRET = UUID(int=7)


def seeing(*names: str) -> AclFilter:
    """The screen of a client that may describe and delete only these of the topics."""
    topology = Topology()
    for number, name in enumerate(("a", "b", "c", "secret-1", "secret-2", "z")):
        topology.set_owner(name.encode(), 0, 1, number + 1)
    topology.set_topic_id(b"secret-1", SECRET.bytes)
    operations = (Operation.DESCRIBE, Operation.DELETE)
    access = access_of((each, Resource.TOPIC, name) for each in operations for name in names)
    return AclFilter(access, topology, Portions())


async def test_topic_pages_contain_only_visible_topics() -> None:
    """The cursor of the next page named a topic, even one that the client may not see."""
    key, limit = keys.DESCRIBE_TOPIC_PARTITIONS, 1
    page, sent = await filtered(seeing("b", "c", "z"), key, 0, topics=[], response_partition_limit=limit)
    # One more than the broker tells of, so that it says that there are more.
    assert [each.name for each in sent.topics] == ["b", "c"]
    cursor = {"topic_name": "d", "partition_index": 0}
    page, sent = await filtered(seeing("b", "c", "z"), key, 0, topics=[], response_partition_limit=9, cursor=cursor)
    assert [each.name for each in sent.topics] == ["z"]
    assert (sent.cursor.topic_name, sent.cursor.partition_index) == ("z", 0)
    # It is the last page.
    assert page.amend is None
    answer = await answered(seeing("other"), key, 0, topics=[])
    assert (answer.topics, answer.next_cursor) == ([], None)
    named = [{"name": name} for name in ("b", "secret-1")]
    page, sent = await filtered(seeing("b"), key, 0, topics=named)
    assert [each.name for each in sent.topics] == ["b"]
    answer = build_response(key, 0, topics=[{"name": "b", "error_code": 0, "partitions": []}])
    assert page.amend is not None
    page.amend(answer)
    assert {each.name: each.error_code for each in answer.topics} == {"b": 0, "secret-1": 29}


async def test_cursor_moves_to_the_next_visible_topic() -> None:
    """Brokers require the cursor's topic among the requested ones, and answered 42 if it was removed."""
    key = keys.DESCRIBE_TOPIC_PARTITIONS
    cursor = {"topic_name": "secret-1", "partition_index": 3}
    named = [{"name": name} for name in ("z", "secret-1", "b", "secret-2")]
    page, sent = await filtered(seeing("b", "z"), key, 0, topics=named, cursor=cursor)
    assert [each.name for each in sent.topics] == ["z"]
    assert (sent.cursor.topic_name, sent.cursor.partition_index) == ("z", 0)
    assert page.amend is not None
    answer = build_response(key, 0, topics=[{"name": "z", "error_code": 0, "partitions": []}])
    page.amend(answer)
    assert [(each.name, each.error_code) for each in answer.topics] == [("z", 0), ("secret-1", 29), ("secret-2", 29)]
    # One that may be seen stays.
    page, sent = await filtered(seeing("secret-1"), key, 0, topics=named, cursor=cursor)
    assert (sent.cursor.topic_name, sent.cursor.partition_index) == ("secret-1", 3)
    answer = await answered(seeing("b"), key, 0, topics=named, cursor=cursor)
    assert {each.error_code for each in answer.topics} == {29}
    # As in Kafka it must be one of them.
    answer = await answered(seeing("b"), key, 0, topics=[{"name": "b"}], cursor=cursor)
    assert [each.error_code for each in answer.topics] == [42]


@pytest.mark.parametrize("version", range(14))
@pytest.mark.parametrize("creates", [True, False])
async def test_brokers_see_no_denied_topic_of_metadata(version: int, creates: bool) -> None:
    """Brokers list topics that do not exist last, so the order showed which denied topics exist."""
    fields = {"allow_auto_topic_creation": creates} if version >= 4 else {}
    topics = [{"name": name} for name in ("secret-1", "unknown", "b", "secret-2")]
    found, sent = await filtered(seeing("b"), keys.METADATA, version, topics=topics, **fields)
    assert [each.name for each in sent.topics] == ["b"]
    assert found.amend is not None
    answer = build_response(keys.METADATA, version, topics=[{"name": "b", "error_code": 0, "partitions": []}])
    found.amend(answer)
    told = [(each.name, each.error_code) for each in answer.topics]
    assert told == [("b", 0), ("secret-1", 29), ("unknown", 29), ("secret-2", 29)]
    encode_response(answer)


async def test_metadata_of_denied_topics_still_names_brokers() -> None:
    """From version 1 on a request without topics asks only for brokers; in version 0 it asks for all topics."""
    for version in range(14):
        found, sent = await filtered(seeing("b"), keys.METADATA, version, topics=[{"name": "secret-1"}])
        assert (found.answer is None) == (version > 0)
        assert sent is None or sent.topics == []


@pytest.mark.parametrize(
    ("api_key", "version", "topics"),
    [(keys.METADATA, 0, []), (keys.METADATA, 1, None), (keys.DESCRIBE_TOPIC_PARTITIONS, 0, [])],
)
async def test_all_topics_are_those_it_sees(api_key: int, version: int, topics: list[str] | None) -> None:
    found, _ = await filtered(seeing("b"), api_key, version, topics=topics)
    assert found.verdict is not None
    assert [found.verdict(name, bytes(16), 0) for name in (b"b", b"secret-1")] == [(0, True), None]


@pytest.mark.parametrize("version", [3, 4, 6])
async def test_state_of_share_groups_needs_administration(version: int) -> None:
    """Their key type passed by the rules of transactional ids, and the broker created a topic for it."""
    asked = {"coordinator_keys": ["x"]} if version >= 4 else {"key": "x"}
    for key_type, error_code in ((2, 31), (3, 42)):
        answer = await answered(seeing("b"), keys.FIND_COORDINATOR, version, key_type=key_type, **asked)
        assert [each.error_code for each in (answer.coordinators if version >= 4 else [answer])] == [error_code]


async def test_page_of_deleted_topics_is_not_the_last() -> None:
    key = keys.DESCRIBE_TOPIC_PARTITIONS
    page, sent = await filtered(seeing("a", "b", "c"), key, 0, topics=[], response_partition_limit=1)
    assert [each.name for each in sent.topics] == ["a", "b"]
    answer = build_response(key, 0, topics=[])
    assert page.amend is not None
    page.amend(answer)
    assert (answer.next_cursor.topic_name, answer.next_cursor.partition_index) == ("c", 0)
    answer = build_response(key, 0, topics=[], next_cursor={"topic_name": "b", "partition_index": 3})
    page.amend(answer)
    assert (answer.next_cursor.topic_name, answer.next_cursor.partition_index) == ("b", 3)


async def test_topic_is_named_or_has_an_id() -> None:
    """Kafka uses the id if Metadata has both, and refuses DeleteTopics with both. Other servers may differ."""
    topics = [{"name": "a", "topic_id": SECRET}]
    decided, _ = await filtered(seeing("a"), keys.METADATA, 10, topics=topics)
    assert decided.verdict is not None
    # The name of the topic with this id is not told.
    assert decided.verdict(b"secret-1", SECRET.bytes, 0) == (29, False)
    (response,) = (await answered(seeing("a"), keys.DELETE_TOPICS, 6, topics=topics)).responses
    assert response.error_code == 42


class Told(SecurityEvents):
    """Keeps the reported denials."""

    def __init__(self) -> None:
        super().__init__(None, Counter())
        self.denials: list[dict[str, Any]] = []

    def tell(self, event: str, **fields: Any) -> None:
        assert event == "denied"
        self.denials.append(fields)


@pytest.mark.parametrize("dry_run", [True, False])
async def test_denials_of_request_are_one_event(dry_run: bool) -> None:
    """In a dry run each name is decided twice: before a broker is asked, and in its answer."""
    events = Told()
    by, names = filter_of(access_of(events=events, dry_run=dry_run)), [f"topic-{number}" for number in range(200)]
    await filtered(by, keys.METADATA, 5, topics=[{"name": name} for name in names])
    by.end()
    (denied,) = events.denials
    assert denied["names"] == names
    assert (denied["operation"], denied["resource"], denied["dry_run"]) == ("describe", "topic", dry_run)
    assert (denied["principal"], denied["error"]) == ("User:ANONYMOUS", "TOPIC_AUTHORIZATION_FAILED")


async def test_denials_in_answer_are_told_at_its_end() -> None:
    events = Told()
    by = filter_of(access_of(events=events))
    found, _ = await filtered(by, keys.METADATA, 12, topics=[{"topic_id": SECRET, "name": None}])
    assert found.verdict is not None
    for _ in range(2):
        found.verdict(b"secret-1", SECRET.bytes, 0)
    assert events.denials == []
    by.end()
    assert [denied["names"] for denied in events.denials] == [["secret-1"]]


async def test_denials_are_told_when_client_leaves_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, events, may_end = acl_filter.decode_request, Told(), threading.Event()

    def slowly(*given: Any) -> object:
        may_end.wait(60)
        return decode(*given)

    monkeypatch.setattr(acl_filter, "decode_request", slowly)
    by, names = filter_of(access_of(events=events)), [f"topic-{n}" for n in range(300)]
    filtering = asyncio.create_task(filtered(by, keys.DELETE_TOPICS, 5, topic_names=names, timeout_ms=1))
    await asyncio.sleep(0.1)
    filtering.cancel()
    await asyncio.gather(filtering, return_exceptions=True)
    may_end.set()
    await eventually(lambda: events.denials)
    assert len(events.denials[0]["names"]) == 300


async def test_denials_of_partitions_are_one_event() -> None:
    events = Told()
    frame = memoryview(bytearray(produce_frame({f"t{n}": [0, 1] for n in range(3)})))
    access_of(events=events).refused_writes(parse_produce(frame, parse_request_header(frame)))
    assert [denied["names"] for denied in events.denials] == [["t0", "t1", "t2"]]


async def test_long_requests_are_read_singly_beside_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the long requests of one client take all threads, and no password is checked."""
    reading, most, may_end = 0, 0, threading.Event()
    decode = acl_filter.decode_request

    def slowly(api_key: int, version: int, body: memoryview) -> object:
        nonlocal reading, most
        if len(body) > long_answers._READ_TOGETHER_BYTES:
            reading += 1
            most = max(most, reading)
            may_end.wait(10)
            reading -= 1
        return decode(api_key, version, body)

    monkeypatch.setattr(acl_filter, "decode_request", slowly)
    # Long names: a request costs by their number.
    names = [{"name": f"topic-{number:090}"} for number in range(300)]
    long, medium, short = (request(keys.METADATA, 5, topics=names[:count]) for count in (300, 60, 1))
    header, access, portions = parse_request_header(long), access_of(), Portions()
    waiting = [asyncio.create_task(AclFilter(access, Topology(), portions).screen(long, header)) for _ in range(40)]
    for frame in (medium, short):
        async with asyncio.timeout(10):
            assert (await AclFilter(access, Topology(), portions).screen(frame, header)).verdict is not None
    assert not any(each.done() for each in waiting)
    may_end.set()
    await asyncio.gather(*waiting)
    assert most == 1


def test_reader_threads_leave_the_event_loop_its_turns(tmp_path: Path) -> None:
    """By default a thread keeps Python's lock for 5 ms at a time: a client with 1 MiB of names delayed all others."""
    tells = "signal.signal(signal.SIGUSR2, lambda *_: print(sys.getswitchinterval(), flush=True))"
    script = f"import signal, sys\nfrom kproxy.__main__ import main\n{tells}\nsys.exit(main())"
    with static_proxy(tmp_path, {1: 1}, command=(sys.executable, "-c", script)) as process:
        process.signal(signal.SIGUSR2)
        assert float(process.read_line()) == pytest.approx(0.001)
