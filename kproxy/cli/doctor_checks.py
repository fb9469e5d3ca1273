"""Check etcd, a proxy, Kafka and replicas, for `kproxy doctor`.

Each check returns findings and raises no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import re
import ssl
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from kproxy.cli.options import AdminPlace
from kproxy.cli.table_sources import NoAnswer, ReplicasUnknown, ask, ask_replication
from kproxy.config import Address
from kproxy.config.etcd import EtcdOptions, tls_context
from kproxy.config.parsing import TOPIC_NAME_RULE
from kproxy.errors import StartupError
from kproxy.etcd import EtcdClient, EtcdDenied, EtcdError, EtcdStatus
from kproxy.etcd.endpoints import parse_endpoints
from kproxy.observe.overview import Overview
from kproxy.observe.table import NO_LEADER, ReplicaRow
from kproxy.ownership.kafka_client import (
    ANY_VERSION,
    PLAIN_ACCESS,
    WITHOUT_TOPIC_IDS,
    BrokerGone,
    BrokerRefused,
    BrokerUnreachable,
    KafkaConnection,
)
from kproxy.ownership.replication import read_replication
from kproxy.security.broker_auth import BrokerAuth
from kproxy_codec import api_keys as keys
from kproxy_codec import error_codes as codes
from kproxy_codec.control import Message
from kproxy_codec.errors import CodecError
from kproxy_codec.record_batch import iterate_batches
from kproxy_codec.records import encode_batch

# The first releases without the known faults in leases: revoked early (before 3.5.13), renewals confirmed of revoked
# leases (before 3.5.23, 3.6.5), and later fixes; and in roles: nested transactions (GHSA-rfx7-8w68-q57q), earlier
# values and leases in transactions (CVE-2026-44283, before 3.4.44, 3.5.30, 3.6.11), watches from a key on
# (GHSA-xg4h-6gfc-h4m8, before 3.5.33, 3.6.14, 3.7.1).
FIT = {(3, 5): 33, (3, 6): 14, (3, 7): 1}
ANSWER_TIMEOUT_S = 5.0
# Certificates and logs depend on the wall clock; leases do not.
CLOCK_TOLERANCE_S = 5.0
# HTTP dates are in whole seconds.
CLOCK_GRAIN_S = 1.0
MAX_ANSWER_BYTES = 64 << 10

# The time for one step at a Kafka broker: to connect, to get an answer, or until a refusal ends.
STEP_S = 3.0
PAUSE_S = 0.2
# The timeout in a produce request.
TIMEOUT_MS = 2_000
# The most brokers of the metadata that are tried.
MAX_NAMED = 64
CLIENT_ID = b"kproxy-doctor"
PROBE_KEY = b"kproxy-doctor"
_NOT_YET = (codes.UNKNOWN_TOPIC_OR_PARTITION, codes.LEADER_NOT_AVAILABLE)
_REFUSED_FOR_NOW = (*_NOT_YET, codes.NOT_LEADER_OR_FOLLOWER, codes.NOT_ENOUGH_REPLICAS)
_WAYS_OUT = {
    codes.NOT_LEADER_OR_FOLLOWER: (
        "its owner has died or is changing; another broker takes over when a dead broker's lease has ended "
        "(--lease-ttl, 10 s): try again in a few seconds"
    ),
    codes.NOT_ENOUGH_REPLICAS: "too few replicas are in sync (min.insync.replicas): start the brokers that are down",
    codes.NOT_ENOUGH_REPLICAS_AFTER_APPEND: "too few replicas are in sync: start the brokers that are down",
    codes.REQUEST_TIMED_OUT: "it was not confirmed in time, and may have been written: see which brokers hang",
    codes.LEADER_NOT_AVAILABLE: "it has no leader yet: see which brokers are down, and try again in a few seconds",
    codes.POLICY_VIOLATION: (
        "only its claimant may write to it (--writer-group), or a policy of the cluster refuses it: name another "
        "topic with --topic"
    ),
    codes.TOPIC_AUTHORIZATION_FAILED: "grant this user the right, or name another topic with --topic",
    codes.CLUSTER_AUTHORIZATION_FAILED: "grant this user the right",
    codes.INVALID_TOPIC_EXCEPTION: f"give --topic a valid name: {TOPIC_NAME_RULE}",
    codes.KAFKA_STORAGE_ERROR: "the broker's disk is full or broken: see its log",
}


class Finding(NamedTuple):
    """One line of the output; `mark` is ok, warn or FAIL.

    Programs also get the name of the check, the URL or address that was checked as `at` (several with commas), and the
    numbers and names in `text` as `facts`.
    """

    mark: str
    text: str
    check: str
    at: str
    facts: Mapping[str, object] = MappingProxyType({})


async def examine_etcd(endpoints: Sequence[str], options: EtcdOptions, prefix: str) -> list[Finding]:
    """Check each member, and then whether the members belong together."""
    try:
        parse_endpoints(endpoints)
    except EtcdError as error:
        return [Finding("FAIL", str(error), "etcd.members", ",".join(endpoints))]
    looked = await asyncio.gather(*(_member(endpoint, options, prefix) for endpoint in endpoints))
    findings = [finding for found, _ in looked for finding in found]
    statuses = [status for _, status in looked if status is not None]
    of_all: list[tuple[str, str]] = []
    if len({status.cluster_id for status in statuses}) > 1:
        of_all.append(("FAIL", "the members named belong to different clusters: name those of one."))
    if len({status.member_id for status in statuses}) < len(statuses):
        of_all.append(("warn", "one member is named twice: name each once, or the loss of this member counts as two."))
    if len(endpoints) < 3:
        of_all.append(("warn", f"{len(endpoints)} of etcd's members named: with three, etcd survives the loss of one."))
    elif 2 * len(statuses) <= len(endpoints):
        of_all.append(("FAIL", "no majority of the members answers: owners cannot change."))
    return findings + [Finding(*each, "etcd.members", ",".join(endpoints)) for each in of_all]


async def _member(endpoint: str, options: EtcdOptions, prefix: str) -> tuple[list[Finding], EtcdStatus | None]:
    client = EtcdClient([endpoint], options, timeout_s=ANSWER_TIMEOUT_S)
    try:
        status = await client.connect()
        began = time.monotonic()
        # Every proxy reads these keys; a user may lack permission for the rest (deploy/etcd/roles.sh).
        permitted = await _may_read(client, f"{prefix}/partition-leases/")
        took_ms = (time.monotonic() - began) * 1000
    except EtcdError as error:
        return [Finding("FAIL", str(error), "etcd.member", endpoint)], None
    finally:
        await client.close()
    tls = "TLS" if endpoint.strip().lower().startswith("https") else "no TLS"
    user = f"user {options.username}" if options.username else "no user"
    role = "leads" if status.leader_id == status.member_id else "follows"
    answers = f"{endpoint}: etcd {status.version}, {tls}, {user}, {role}, answers in {took_ms:.0f} ms"
    facts = {"version": status.version, "ms": round(took_ms, 1)}
    denied = Finding("FAIL", f"{endpoint}: this user may not read the keys under {prefix}/.", "etcd.access", endpoint)
    findings = [
        Finding("ok", answers, "etcd.member", endpoint, facts),
        *([] if permitted else [denied]),
        *(
            Finding("FAIL", f"{endpoint}: etcd raises an alarm: {alarm}.", "etcd.alarm", endpoint)
            for alarm in status.errors
        ),
        *_about_version(endpoint, status.version),
        *await _about_clock(endpoint, options),
    ]
    return findings, status


async def _may_read(client: EtcdClient, prefix: str) -> bool:
    try:
        await client.get_snapshot(prefix)
    except EtcdDenied:
        return False
    return True


def _about_version(endpoint: str, version: str) -> list[Finding]:
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None:
        return [Finding("warn", f"{endpoint}: unknown version {version!r} of etcd.", "etcd.version", endpoint)]
    major, minor, patch = map(int, numbers.groups())
    if (major, minor) > max(FIT) or patch >= FIT.get((major, minor), patch + 1):
        return []
    wanted = " or ".join(f"{major}.{minor}.{patch}" for (major, minor), patch in FIT.items())
    text = f"{endpoint}: etcd {version} has known faults in its leases or its roles: use {wanted}."
    return [Finding("warn", text, "etcd.version", endpoint)]


async def _about_clock(endpoint: str, options: EtcdOptions, clock: Callable[[], float] = time.time) -> list[Finding]:
    """Compare this machine's clock with the Date header of etcd's HTTP answers."""
    (parsed,) = parse_endpoints([endpoint])
    try:
        context = await asyncio.to_thread(tls_context, options) if parsed.tls else None
        name = (options.server_name or parsed.host) if parsed.tls else None
        head = await _head(Address(parsed.host, parsed.port), context, name)
    except (OSError, TimeoutError, StartupError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return [Finding("warn", f"{endpoint}: the member's clock is unreadable.", "etcd.clock", endpoint)]
    told = re.search(r"(?im)^date: *(.+?)\r?$", head)
    if told is None:
        return []
    ahead_s = email.utils.parsedate_to_datetime(told[1]).timestamp() - clock()
    if abs(ahead_s) <= CLOCK_TOLERANCE_S + CLOCK_GRAIN_S:
        return []
    which = "ahead of" if ahead_s > 0 else "behind"
    text = f"{endpoint}: the clock is {abs(ahead_s):.0f} s {which} this machine's: certificates and logs use it."
    return [Finding("warn", text, "etcd.clock", endpoint)]


_TROUBLES = {
    "hung": "takes requests and does not answer: restart it, so that others take over its partitions",
    "down": "cannot be reached by the proxy: start it, or see `broker became unreachable` in the proxy's log",
    "gone": "has left the cluster within the last ten minutes: start it, unless it was removed on purpose",
}


async def examine_proxy(place: AdminPlace) -> list[Finding]:
    """Check a proxy's admin page, and the brokers that the proxy cannot reach or that do not answer it."""
    mark, text = await _about_page(place)
    ready = Finding(mark, text, "proxy.ready", str(place))
    return [ready] if mark == "FAIL" else [ready, *await _about_brokers(place)]


async def _about_brokers(place: AdminPlace) -> list[Finding]:
    try:
        status, body = await asyncio.to_thread(ask, place, "/overview")
        brokers = msgspec.json.decode(body, type=Overview).brokers if status == 200 else ()
    except (NoAnswer, msgspec.DecodeError) as error:
        return [Finding("warn", f"the proxy's brokers are unknown: {error}", "proxy.broker", str(place))]
    return [
        Finding(
            "warn",
            f"broker {each.id} at {each.address} {_TROUBLES[each.state]}.",
            "proxy.broker",
            str(place),
            {"broker": each.id, "state": each.state},
        )
        for each in brokers
        if each.state in _TROUBLES
    ]


async def _about_page(place: AdminPlace) -> tuple[str, str]:
    try:
        status, body = await asyncio.to_thread(ask, place, "/readyz")
    except NoAnswer as error:
        return "FAIL", str(error)
    said = body.decode(errors="replace").strip().splitlines() or [""]
    if status == 200:
        return "ok" if said[0] == "ready" else "warn", f"the proxy at {place}: {said[0][:500]}"
    if status == 503:
        return "FAIL", f"the proxy at {place} is not ready: {said[0][:500]}"
    return "FAIL", f"the server at {place} is not an admin page of kproxy (status {status})."


async def examine_kafka(
    addresses: Sequence[Address], topic: str | None, access: BrokerAuth = PLAIN_ACCESS
) -> list[Finding]:
    """Check Kafka like a client whose bootstrap servers are `addresses`.

    Write a record to `topic` if given. The servers are accessed by `access`.

    A client connects to the brokers that metadata names, by the addresses given there, so each of these is tried from
    this machine. Each step takes about STEP_S at most.
    """
    async with AsyncExitStack() as stack:
        dialled = await asyncio.gather(*(_bootstrap(stack, address, access) for address in dict.fromkeys(addresses)))
        findings = [finding for finding, _ in dialled]
        told = [each for _, each in dialled if each is not None]
        if not told:
            return findings
        findings += await _about_named(told, access)
        if len({each.cluster_id for each in told}) > 1:
            text = "the addresses belong to different clusters: name those of one."
            findings.append(Finding("FAIL", text, "kafka.cluster", ",".join(map(str, addresses))))
        if topic is not None:
            findings += await _Probe(stack, told[0], topic, access).run()
        return findings


class _Told(NamedTuple):
    """The metadata from one bootstrap address: the brokers by id."""

    address: Address
    connection: KafkaConnection
    brokers: dict[int, Address]
    cluster_id: str | None


async def _bootstrap(stack: AsyncExitStack, address: Address, access: BrokerAuth) -> tuple[Finding, _Told | None]:
    began = time.monotonic()
    try:
        told = await _ask_who(stack, address, access)
    except BrokerUnreachable as error:
        way_out = "start the server there, or name another address with --bootstrap H:P."
        text = f"{error}: {await _remedy(error, address, access) or way_out}"
        return Finding("FAIL", text, "kafka.bootstrap", str(address)), None
    took_ms = _ms_since(began)
    count = len(told.brokers)
    named = f"names {count} {'broker' if count == 1 else 'brokers'}"
    facts = {"brokers": {str(number): str(each) for number, each in sorted(told.brokers.items())}, "ms": took_ms}
    if not told.brokers:
        text = f"{address}: speaks Kafka, but names no broker, so clients cannot connect: see its log."
        return Finding("FAIL", text, "kafka.bootstrap", str(address), facts), None
    text = f"{address}: speaks Kafka, {named} ({took_ms} ms)"
    return Finding("ok", text, "kafka.bootstrap", str(address), facts), told


async def _ask_who(stack: AsyncExitStack, address: Address, access: BrokerAuth) -> _Told:
    """Connect and ask for metadata. Raises BrokerUnreachable."""
    connection = await KafkaConnection.open(address, STEP_S, CLIENT_ID, access)
    stack.push_async_callback(connection.close)
    try:
        answer = await connection.ask(keys.METADATA, ANY_VERSION, topics=[], allow_auto_topic_creation=False)
    except BrokerGone as error:
        # Before a login a server answers only ApiVersions, and closes the connection on any other request.
        raise error if access.has_sasl else _LoginWanted(str(error)) from error
    brokers = {each.node_id: Address(each.host, each.port) for each in answer.brokers}
    return _Told(address, connection, brokers, getattr(answer, "cluster_id", None))


class _LoginWanted(BrokerUnreachable):
    """The server seems to want SASL."""


async def _remedy(error: BrokerUnreachable, address: Address, access: BrokerAuth) -> str:
    """Return the remedy if TLS or SASL is wrong, or missing where the server speaks it; else ""."""
    if isinstance(error, _LoginWanted):
        return (
            "the server there probably wants SASL: give --broker-sasl-mechanism and --broker-sasl-username, and the "
            "password in KPROXY_BROKER_SASL__PASSWORD."
        )
    if isinstance(error, BrokerRefused):
        return "correct the flags --broker-tls-... and --broker-sasl-..., or their variables."
    if access.context() is not None:
        return ""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(STEP_S):
            _, writer = await asyncio.open_connection(*address, ssl=context)
    except (OSError, TimeoutError) as error:
        # An alert shows TLS too: the server wants another version, or a certificate.
        if not isinstance(error, ssl.SSLError) or "ALERT" not in (error.reason or ""):
            return ""
    else:
        writer.close()
    return (
        "the server there speaks TLS: give --broker-tls-enabled, or --broker-tls-ca FILE for an authority of its own."
    )


async def _about_named(told: Sequence[_Told], access: BrokerAuth) -> list[Finding]:
    """Check whether clients on this machine reach the named brokers, and find the same cluster there."""
    named: dict[Address, tuple[int, _Told]] = {}
    for each in told:
        for number, address in each.brokers.items():
            named.setdefault(address, (number, each))
    looked_at = list(named.items())[:MAX_NAMED]
    findings = await asyncio.gather(*(_about_one(address, *by, access) for address, by in looked_at))
    if len(named) > MAX_NAMED:
        text = f"{len(named) - MAX_NAMED} more brokers are named and not checked."
        findings.append(Finding("warn", text, "kafka.named", str(told[0].address)))
    return findings


async def _about_one(address: Address, number: int, by: _Told, access: BrokerAuth) -> Finding:
    at = str(address)
    began = time.monotonic()
    try:
        async with AsyncExitStack() as stack:
            met = await _ask_who(stack, address, access)
    except BrokerUnreachable as error:
        way_out = (
            "start it if it is down; otherwise correct the address that it advertises (--advertise of kproxy, "
            "advertised.listeners of Kafka)."
        )
        text = (
            f"{error}, but {by.address} tells clients to connect to it, as broker {number}: "
            f"{await _remedy(error, address, access) or way_out}"
        )
        return Finding("FAIL", text, "kafka.named", at, {"broker": number})
    took_ms = _ms_since(began)
    facts = {"broker": number, "ms": took_ms}
    if met.cluster_id != by.cluster_id:
        text = (
            f"{at}: {by.address} tells clients to connect to it, as broker {number}, but it belongs to another cluster "
            f"({met.cluster_id}, not {by.cluster_id}): correct the address that broker {number} advertises."
        )
        return Finding("FAIL", text, "kafka.named", at, facts)
    text = f"{at}: advertised as broker {number}, reachable from here ({took_ms} ms)"
    return Finding("ok", text, "kafka.named", at, facts)


class _Failed(Exception):
    """The probe has failed; the message states the reason and the remedy."""


class _Probe:
    """Write one record with acks=all, the default of clients, and read it back."""

    def __init__(self, stack: AsyncExitStack, told: _Told, topic: str, access: BrokerAuth) -> None:
        self._access = access
        self._stack = stack
        self._told = told
        self._topic = topic
        self._mark = uuid.uuid4().hex
        self._connections = {told.address: told.connection}
        self._findings: list[Finding] = []
        # The current check, and its address.
        self._check, self._at = "kafka.topic", told.address

    async def run(self) -> list[Finding]:
        try:
            leaders = await self._find_leaders()
            leader, partition, offset = await self._write(leaders)
            await self._read(leader, partition, offset)
        except _Failed as error:
            self._tell("FAIL", str(error))
        except BrokerUnreachable as error:
            self._tell("FAIL", f"{error}: see its log, and whether it is overloaded.")
        return self._findings

    def _tell(self, mark: str, text: str, **facts: object) -> None:
        facts = {"topic": self._topic, **facts}
        self._findings.append(Finding(mark, text, self._check, str(self._at), facts))

    async def _find_leaders(self) -> dict[int, Address]:
        """Return the addresses of leaders by partition. Brokers with auto-creation create the topic."""
        topic = await self._ask_topic(create=False)
        created = topic.error_code == codes.UNKNOWN_TOPIC_OR_PARTITION
        deadline = time.monotonic() + STEP_S
        while topic.error_code in (codes.NONE, *_NOT_YET) and not self._led(topic) and time.monotonic() < deadline:
            topic = await self._ask_topic(create=True)
            if not self._led(topic):
                await asyncio.sleep(PAUSE_S)
        if topic.error_code == codes.UNKNOWN_TOPIC_OR_PARTITION:
            raise _Failed(
                f"there is no topic {self._topic}, and the brokers create none by themselves: create it, or name an "
                f"existing one with --topic."
            )
        if topic.error_code != codes.NONE:
            raise _Failed(self._why(f"topic {self._topic} cannot be used", topic.error_code))
        leaders, count = self._led(topic), len(topic.partitions)
        partitions = f"{count} {'partition' if count == 1 else 'partitions'}"
        if not leaders:
            raise _Failed(f"none of the {partitions} of topic {self._topic} has a leader: see which brokers are down.")
        if len(leaders) < count:
            text = f"topic {self._topic}: {count - len(leaders)} of {partitions} have no leader: start dead brokers."
            self._tell("warn", text, partitions=count, created=created)
        else:
            text = f"topic {self._topic}: {partitions}{', created just now' if created else ''}"
            self._tell("ok", text, partitions=count, created=created)
        return leaders

    async def _ask_topic(self, *, create: bool) -> Message:
        asked = [{"name": self._topic}]
        answer = await self._told.connection.ask(
            keys.METADATA, WITHOUT_TOPIC_IDS, topics=asked, allow_auto_topic_creation=create
        )
        self._told.brokers.update({each.node_id: Address(each.host, each.port) for each in answer.brokers})
        if not answer.topics:
            raise _Failed(f"{self._told.address} returns no metadata of topic {self._topic}: see its log.")
        return answer.topics[0]

    def _led(self, topic: Message) -> dict[int, Address]:
        brokers = self._told.brokers
        return {
            each.partition_index: brokers[each.leader_id]
            for each in sorted(topic.partitions, key=lambda each: each.partition_index)
            if each.leader_id in brokers
        }

    async def _write(self, leaders: dict[int, Address]) -> tuple[KafkaConnection, int, int]:
        """Write the record; return the leader, partition and offset. Retry refusals for STEP_S, as clients do."""
        self._check = "kafka.write"
        began = time.monotonic()
        refused = codes.NONE
        while True:
            partition, self._at = next(iter(leaders.items()))
            leader = await self._dial(self._at, partition)
            sent = time.monotonic()
            answer = await self._produce(leader, partition)
            if answer.error_code == codes.NONE:
                break
            refused = answer.error_code
            if refused not in _REFUSED_FOR_NOW or time.monotonic() - began > STEP_S:
                raise _Failed(
                    self._why(f"no record was written to {self._topic}, partition {partition}", refused, answer)
                )
            await asyncio.sleep(PAUSE_S)
            leaders = self._led(await self._ask_topic(create=False)) or leaders
        took_ms = _ms_since(sent)
        text = f"wrote a record to {self._topic}, partition {partition}, offset {answer.base_offset} ({took_ms} ms)"
        if refused != codes.NONE:
            text += f", after {sent - began:.1f} s in which it was refused with {codes.name_of(refused)}"
        mark = "ok" if refused == codes.NONE else "warn"
        self._tell(mark, text, partition=partition, offset=answer.base_offset, ms=took_ms)
        return leader, partition, answer.base_offset

    async def _dial(self, address: Address, partition: int) -> KafkaConnection:
        if address in self._connections:
            return self._connections[address]
        try:
            connection = await KafkaConnection.open(address, STEP_S, CLIENT_ID, self._access)
        except BrokerUnreachable as error:
            raise _Failed(
                f"no record was written to {self._topic}, partition {partition}: {error}, and clients write "
                f"there: start it, or correct the address that it advertises."
            ) from error
        self._stack.push_async_callback(connection.close)
        self._connections[address] = connection
        return connection

    async def _produce(self, leader: KafkaConnection, partition: int) -> Message:
        written = [{"index": partition, "records": _batch(self._mark)}]
        try:
            answer = await leader.ask(
                keys.PRODUCE,
                WITHOUT_TOPIC_IDS,
                transactional_id=None,
                acks=-1,
                timeout_ms=TIMEOUT_MS,
                topic_data=[{"name": self._topic, "partition_data": written}],
            )
        except BrokerUnreachable as error:
            raise _Failed(
                f"{error}: the record for {self._topic}, partition {partition}, may or may not be there; see which "
                f"brokers hang, and their logs."
            ) from error
        if not answer.responses or not answer.responses[0].partition_responses:
            raise _Failed(f"{self._at} returns an empty Produce response: see its log.")
        return answer.responses[0].partition_responses[0]

    async def _read(self, leader: KafkaConnection, partition: int, offset: int) -> None:
        self._check = "kafka.read"
        began = time.monotonic()
        fetched = await self._fetch(leader, partition, offset)
        while fetched.error_code in (codes.NONE, codes.OFFSET_NOT_AVAILABLE) and not fetched.records:
            if time.monotonic() - began > STEP_S:
                raise _Failed(
                    f"the record at {self._topic}, partition {partition}, offset {offset} was acknowledged, and "
                    f"consumers cannot read it: see whether the brokers replicate."
                )
            await asyncio.sleep(PAUSE_S)
            fetched = await self._fetch(leader, partition, offset)
        if fetched.error_code != codes.NONE:
            what = f"{self._topic}, partition {partition}, offset {offset} cannot be read"
            raise _Failed(self._why(what, fetched.error_code))
        if not _holds(fetched.records, offset, self._mark):
            raise _Failed(
                f"another record is at {self._topic}, partition {partition}, offset {offset}, where this one was "
                f"acknowledged: see `kproxy pipeline audit`."
            )
        took_ms = _ms_since(began)
        self._tell("ok", f"read it back ({took_ms} ms)", partition=partition, offset=offset, ms=took_ms)

    async def _fetch(self, leader: KafkaConnection, partition: int, offset: int) -> Message:
        asked = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": MAX_ANSWER_BYTES}
        answer = await leader.ask(
            keys.FETCH,
            WITHOUT_TOPIC_IDS,
            replica_id=-1,
            max_wait_ms=int(PAUSE_S * 1000),
            min_bytes=1,
            max_bytes=MAX_ANSWER_BYTES,
            topics=[{"topic": self._topic, "partitions": [asked]}],
        )
        if not answer.responses or not answer.responses[0].partitions:
            raise _Failed(f"{self._at} answers a Fetch with {codes.name_of(answer.error_code)}: see its log.")
        return answer.responses[0].partitions[0]

    def _why(self, what: str, error_code: int, answer: Message = None) -> str:
        said = f"{getattr(answer, 'error_message', None) or ''}".rstrip(".")
        way_out = _WAYS_OUT.get(error_code, "see the broker's log, or name another topic with --topic")
        return f"{what}: {self._at} says {codes.name_of(error_code)}{f' ({said[:200]})' if said else ''}: {way_out}."


def _batch(mark: str) -> bytes:
    # The record has a key, because compacted topics accept no record without one.
    value = json.dumps({"written by": "kproxy doctor", "id": mark}).encode()
    return bytes(encode_batch([(PROBE_KEY, value)], time.time_ns() // 1_000_000))


def _holds(records: bytes, offset: int, mark: str) -> bool:
    """Whether the record with that mark is at `offset` or, if a broker has compressed it, any record."""
    try:
        for batch in iterate_batches(records):
            if batch.base_offset <= offset <= batch.last_offset:
                return bool(batch.compression) or mark.encode() in records[batch.position : batch.end]
    except CodecError:
        # The records are cut within a later batch, or are not readable here.
        return False
    return False


def _ms_since(began: float) -> float:
    return round((time.monotonic() - began) * 1000, 1)


async def _head(address: Address, context: ssl.SSLContext | None, name: str | None) -> str:
    """Return the head of the answer to GET /version, by HTTP/1.0."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname=name)
        try:
            writer.write(f"GET /version HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    if not head.startswith(b"HTTP/1."):
        raise ConnectionError("it does not speak HTTP")
    return head.decode(errors="replace")


# The most partitions named in a sentence, and the most in the facts.
MAX_NAMED_PARTITIONS = 5
MAX_FACTS = 1_000


async def replication_in_etcd(endpoints: Sequence[str], options: EtcdOptions, prefix: str) -> list[Finding]:
    """Check replicas in etcd.

    Returns no finding if etcd does not answer, which `examine_etcd` reports.
    """
    client = EtcdClient(endpoints, options, timeout_s=ANSWER_TIMEOUT_S)
    try:
        await client.connect()
        known = await read_replication(client, prefix)
    except EtcdError:
        return []
    finally:
        await client.close()
    return about_replicas(known.rows, known.brokers, ",".join(endpoints))


async def replication_of_proxy(place: AdminPlace) -> list[Finding]:
    """Check replicas by a proxy's admin page.

    Returns no finding if no page answers, which `examine_proxy` reports.
    """
    try:
        pages = await asyncio.to_thread(ask_replication, place)
    except NoAnswer:
        return []
    except ReplicasUnknown as unknown:
        text = f"the in-sync replicas are unknown: {unknown}"
        return [Finding("warn", text, "replication.isr", str(place))]
    rows = [row for page in pages for row in page.partitions]
    return about_replicas(rows, pages[-1].brokers if pages else [], str(place))


def about_replicas(rows: Sequence[ReplicaRow], live: Collection[int], at: str) -> list[Finding]:
    """Report each broker missing in an ISR, partitions that refuse acks=all, and partitions without a leader."""
    if not rows:
        return []
    findings = []
    for broker in sorted({missing for row in rows for missing in row.missing}):
        lacking = [row for row in rows if broker in row.missing]
        why = (
            "its lease is alive, so it has not caught up (see its log) or died just now"
            if broker in live
            else "it is down: start it"
        )
        text = f"broker {broker} is not in sync for {_named(lacking, len(rows))}: {why}."
        findings.append(_warn("replication.isr", text, at, lacking, broker=broker, alive=broker in live))
    refused = [row for row in rows if row.is_under_min_isr]
    if refused:
        missing = _brokers({each for row in refused for each in row.missing})
        text = f"acks=all is refused for {_named(refused, len(rows))}: fewer replicas are in sync than "
        text += f"min.insync.replicas wants, without {missing}."
        findings.append(_warn("replication.min_isr", text, at, refused))
    leaderless = [row for row in rows if row.leader == NO_LEADER]
    if leaderless:
        waits_for = {each for row in leaderless if not set(row.isr) & set(live) for each in row.isr}
        way_out = f"start {_brokers(waits_for)}, the last in sync" if waits_for else "one is elected within seconds"
        text = f"no broker leads {_named(leaderless, len(rows))}, so clients cannot write or read there: {way_out}."
        findings.append(_warn("replication.leader", text, at, leaderless))
    if not findings:
        text = f"all replicas of {_count(len(rows))} are in sync"
        findings.append(Finding("ok", text, "replication.isr", at, {"count": len(rows)}))
    return findings


def _warn(check: str, text: str, at: str, rows: Sequence[ReplicaRow], **facts: object) -> Finding:
    partitions = [f"{row.topic}/{row.partition}" for row in rows[:MAX_FACTS]]
    return Finding("warn", text, check, at, {"count": len(rows), "partitions": partitions, **facts})


def _named(rows: Sequence[ReplicaRow], of: int) -> str:
    """Return a text such as `2 of 12 partitions (t/0, t/1)`."""
    names = [f"{row.topic}/{row.partition}" for row in rows[:MAX_NAMED_PARTITIONS]]
    more = f" and {len(rows) - MAX_NAMED_PARTITIONS:,} more" if len(rows) > MAX_NAMED_PARTITIONS else ""
    return f"{len(rows):,} of {_count(of)} ({', '.join(names)}{more})"


def _count(partitions: int) -> str:
    return f"{partitions:,} {'partition' if partitions == 1 else 'partitions'}"


def _brokers(ids: Iterable[int]) -> str:
    listed = sorted(ids)
    return f"{'broker' if len(listed) == 1 else 'brokers'} {', '.join(map(str, listed))}"
