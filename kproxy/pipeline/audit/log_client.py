"""Query a cluster for leaders, the bounds of logs, and their batches, over one blocking connection to each broker.

Spark's executors use it, so it needs only the standard library, `kproxy_codec` and kafka-python, which executors get as
pure Python.

States of a partition: KNOWN (its leader is remembered) <-> UNKNOWN. A leader is forgotten when a request to it fails or
it answers that it is not the leader; the next request then asks for Metadata first.

Invariants
1. Every wait is bounded: a call fails when nothing has succeeded for `patience_s` (`Patience`).
2. Errors that a retry cannot fix are raised at once.
3. One connection per broker, and no more brokers than the cluster has; `close` leaves none open.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kproxy.pipeline.kafka_access import NO_OPTIONS, Credentials, KafkaAccess, WrongKafkaOption, read_access
from kproxy.routing.topology import Address
from kproxy_codec import api_keys as keys
from kproxy_codec import error_codes
from kproxy_codec.control import Message, build_request, decode_response, encode_request, version_range
from kproxy_codec.correlation import AwaitedAnswers
from kproxy_codec.errors import CodecError, FrameTooLarge
from kproxy_codec.fetch import FINAL_EPOCH, MIN_VERSION, NO_SESSION, PartitionFetched
from kproxy_codec.fetch_answer import MAX_VERSION, read_fetch_answer
from kproxy_codec.foreign import ANSWER_TO_HTTP, answered_in
from kproxy_codec.framing import FrameReader, frame_message, request_header, response_body_offset
from kproxy_codec.metadata import HIGHEST_VERSION, MetadataReader, TopicLeaders

if TYPE_CHECKING:
    from kproxy.security.sasl_client import Request

CLIENT_ID: Final = b"kproxy-audit"
PLAIN_TEXT: Final = KafkaAccess()
# Brokers send the first batch whole, however large: the most that an answer may exceed the requested bytes.
LARGEST_BATCH_BYTES: Final = 128 << 20
# Large enough for the Metadata answer of a large cluster.
MAX_CONTROL_BYTES: Final = 128 << 20
# Longer answers are received into one buffer that is reused: fresh memory costs more than their reading.
_SHARED_BYTES: Final = 64 << 10
_READ_UNCOMMITTED: Final = 0
# Brokers need not wait long for new records: a reader at the end of a log asks again.
_MAX_WAIT_MS: Final = 100
# If a port's first answer takes longer, check for HTTP: etcd, for one, waits for more bytes of a Kafka request.
_SUSPECT_AFTER_S: Final = 1.0
_HTTP_QUESTION: Final = b"GET / HTTP/1.0\r\n\r\n"


class LogReadFailed(Exception):
    """A log cannot be read; the sentence names topic, partition and offset if they are known."""


class BrokerFailed(Exception):
    """A broker did not answer, or not readably; another attempt may succeed. The text names broker and reason."""


class LogConnection:
    """Send requests to one broker, one at a time. `timeout_s` bounds connecting and each answer, in seconds.

    An answer's bytes are valid until the next request, as the buffer is reused.
    """

    def __init__(
        self,
        address: Address,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        access: KafkaAccess = PLAIN_TEXT,
    ) -> None:
        """Connect, ask for the broker's API versions, and authenticate.

        Raise BrokerFailed, or LogReadFailed if it is not a broker or refuses the credentials.
        """
        self.address = address
        self._is_plain_text = access.context is None
        self._timeout_s = timeout_s
        self._clock = clock
        self._frames = FrameReader(MAX_CONTROL_BYTES, most_shared=_SHARED_BYTES)
        self._awaited: AwaitedAnswers[None] = AwaitedAnswers(self._frames, most=1)
        self._has_answered = False
        self._buffer = bytearray()
        self._offered: Mapping[int, tuple[int, int]] = MappingProxyType({keys.API_VERSIONS: (0, 0)})
        try:
            self._socket = socket.create_connection(address, timeout_s)
        except OSError as error:
            raise BrokerFailed(f"{address} cannot be reached ({_why(error)})") from error
        try:
            self._begin(access)
        except BaseException:
            self.close()
            raise

    def _begin(self, access: KafkaAccess) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._secure(access.context)
        try:
            answer = self.ask(keys.API_VERSIONS, 0)
        except BrokerFailed:
            self.close()
            self._expect_no_http()
            raise
        self._has_answered = True
        self._offered = {api.api_key: (api.min_version, api.max_version) for api in answer.api_keys}
        if access.credentials is not None:
            self._authenticate(access.credentials)

    def _secure(self, context: ssl.SSLContext | None) -> None:
        if context is None:
            return
        try:
            self._socket = context.wrap_socket(self._socket, server_hostname=self.address.host)
        except ssl.SSLCertVerificationError as error:
            raise LogReadFailed(
                f"{self.address} shows a certificate that is not accepted ({error.verify_message}): "
                f"see ssl.truststore.location."
            ) from error
        except (OSError, EOFError) as error:
            raise BrokerFailed(f"{self.address} does not finish the handshake of TLS ({_why(error)})") from error

    def _authenticate(self, credentials: Credentials) -> None:
        # Imported here: nobody else needs SCRAM.
        from kproxy.security.sasl_client import SaslClient, SaslRefused, mechanism

        versions = self._offered.get(keys.SASL_AUTHENTICATE)
        if versions is None:
            raise LogReadFailed(f"{self.address} has no SASL: drop sasl.mechanism, or name another port.")
        client = SaslClient(mechanism(*credentials), versions[1], "sasl.mechanism")
        try:
            asked: Request | None = client.begin()
            while asked is not None:
                answer = self._exchange(asked.api_key, asked.api_version, MAX_CONTROL_BYTES, asked.body)
                asked = client.receive(answer[response_body_offset(answer, asked.api_key, asked.api_version) :])
        except SaslRefused as error:
            raise LogReadFailed(f"{self.address} does not let {credentials.username} in: {error}.") from error

    def close(self) -> None:
        self._socket.close()

    def serves(self, api_key: int) -> bool:
        return api_key in self._offered

    def ask(self, api_key: int, at_most: int, **fields: Any) -> Message:
        """Return the answer, in the highest version up to `at_most` that both sides know. Raise BrokerFailed."""
        version, frame = self.exchange(api_key, at_most, **fields)
        try:
            return decode_response(api_key, version, frame[response_body_offset(frame, api_key, version) :])
        except CodecError as error:
            raise self._failed(api_key, error) from error

    def exchange(self, api_key: int, at_most: int, **fields: Any) -> tuple[int, memoryview]:
        """Do the same as `ask`, but return the version and the undecoded answer."""
        version = self._version(api_key, version_range(api_key), at_most)
        body = encode_request(build_request(api_key, version, **fields))
        return version, self._exchange(api_key, version, MAX_CONTROL_BYTES, body)

    def fetch(self, topic: str, partition: int, offset: int, max_bytes: int) -> PartitionFetched:
        """Return the batches from the one that contains `offset`, at most `max_bytes` or one batch. Raise BrokerFailed.

        Reading stops at the high watermark; open transactions do not stop it.
        """
        version = self._version(keys.FETCH, (MIN_VERSION, MAX_VERSION), MAX_VERSION)
        asked = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": max_bytes}
        unknown = {"current_leader_epoch": -1, "last_fetched_epoch": -1, "log_start_offset": -1}
        fields = {
            "replica_id": -1,
            "max_wait_ms": _MAX_WAIT_MS,
            "min_bytes": 1,
            "max_bytes": max_bytes,
            "isolation_level": _READ_UNCOMMITTED,
            "session_id": NO_SESSION,
            "session_epoch": FINAL_EPOCH,
            "topics": [{"topic": topic, "partitions": [{**asked, **unknown}]}],
            "forgotten_topics_data": [],
            "rack_id": "",
        }
        body = encode_request(build_request(keys.FETCH, version, **fields))
        frame = self._exchange(keys.FETCH, version, max_bytes + LARGEST_BATCH_BYTES, body)
        try:
            return read_fetch_answer(frame, version, topic)
        except CodecError as error:
            raise self._failed(keys.FETCH, error) from error

    def _version(self, api_key: int, ours: tuple[int, int], at_most: int) -> int:
        theirs = self._offered.get(api_key)
        if theirs is None or max(theirs[0], ours[0]) > min(theirs[1], ours[1], at_most):
            raise LogReadFailed(
                f"{self.address} serves no version of {keys.name_of(api_key)} that is known here: "
                f"give the address of a kproxy or of a Kafka cluster of version 2 or later."
            )
        return min(theirs[1], ours[1], at_most)

    def _exchange(self, api_key: int, version: int, most_bytes: int, body: bytes) -> memoryview:
        try:
            correlation_id = self._awaited.next_id()
            header = request_header(api_key, version, correlation_id, CLIENT_ID)
            self._awaited.sent(correlation_id, None)
            self._frames.admit(most_bytes)
            deadline = self._clock() + self._timeout_s
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(frame_message(header, body))
            if self._is_plain_text and not self._has_answered and not self._begins_to_answer():
                self._expect_no_http()
            return self._receive(deadline)
        except (OSError, EOFError, CodecError) as error:
            if isinstance(error, FrameTooLarge):
                self._expect_kafka(error.first_bytes)
            raise self._failed(api_key, error) from error

    def _begins_to_answer(self) -> bool:
        self._socket.settimeout(min(_SUSPECT_AFTER_S, self._timeout_s))
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        return True

    def _expect_no_http(self) -> None:
        """Send an HTTP request on another connection. Raise LogReadFailed if HTTP is answered; else do nothing."""
        if not self._is_plain_text:
            return
        try:
            with socket.create_connection(self.address, _SUSPECT_AFTER_S) as asked:
                asked.sendall(_HTTP_QUESTION)
                answer = asked.recv(len(ANSWER_TO_HTTP))
        except OSError:
            return
        # This answer comes from a kproxy listener, which is only slow.
        if not ANSWER_TO_HTTP.startswith(answer):
            self._expect_kafka(answer)

    def _expect_kafka(self, beginning: bytes) -> None:
        if protocol := answered_in(beginning):
            raise LogReadFailed(
                f"{self.address} speaks {protocol}: give the address of a Kafka listener; for TLS, security.protocol."
            )

    def _receive(self, deadline: float) -> memoryview:
        while True:
            left_s = deadline - self._clock()
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            received = self._socket.recv_into(self._frames.get_buffer())
            if not received:
                raise EOFError("the connection was closed")
            if answers := [*self._awaited.receive(received)]:
                return answers[0][1]
            if self._frames.announced > _SHARED_BYTES and not self._frames.has_own:
                if self._frames.announced > len(self._buffer):
                    # Views of the old buffer may still be in use, so it is not resized.
                    self._buffer = bytearray(self._frames.announced)
                self._frames.move_to(self._buffer)

    def _failed(self, api_key: int, error: BaseException) -> BrokerFailed:
        return BrokerFailed(f"{self.address} did not answer {keys.name_of(api_key)} ({_why(error)})")


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


EARLIEST: Final = -2
LATEST: Final = -1
# Requests about more partitions are split.
PARTITIONS_PER_QUESTION: Final = 1000
# A new topic may not be known to every broker yet.
UNKNOWN_TOPIC_TRIES: Final = 5
_FIRST_PAUSE_S: Final = 0.05
_LAST_PAUSE_S: Final = 2.0
_TOPIC: Final = 2
_CLEANUP_POLICY: Final = "cleanup.policy"
_LIST_OFFSETS_VERSION: Final = 9
_DESCRIBE_CONFIGS_VERSION: Final = 4

_NO_SUCH_TOPIC: Final = frozenset({error_codes.UNKNOWN_TOPIC_OR_PARTITION, error_codes.INVALID_TOPIC_EXCEPTION})


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"topic {self.topic}, partition {self.partition}"


class Patience:
    """Growing pauses between attempts, until nothing has succeeded for `seconds`."""

    def __init__(self, seconds: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self.succeeded()

    def succeeded(self) -> None:
        self._since = self._clock()
        self._pause_s = _FIRST_PAUSE_S

    def pause(self, reason: str) -> None:
        """Wait before the next attempt. If there is none, raise LogReadFailed with the last attempt's `reason`."""
        waited_s = self._clock() - self._since
        if waited_s >= self._seconds:
            raise LogReadFailed(f"{reason}; given up after {waited_s:.0f} s.")
        self._sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)


class LogClient:
    """Not for concurrent use. Times are in seconds. `topic_ids` has the ids of requested topics, in hex.

    `kafka` has options of Kafka's clients about TLS and SASL. Raise LogReadFailed if they cannot be used.
    """

    def __init__(
        self,
        bootstrap: Sequence[Address],
        *,
        timeout_s: float,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        kafka: Mapping[str, str] = NO_OPTIONS,
    ) -> None:
        self._bootstrap = tuple(bootstrap)
        try:
            self._access = read_access(kafka)
        except WrongKafkaOption as error:
            raise LogReadFailed(str(error)) from error
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._clock = clock
        self._sleep = sleep
        self._connections: dict[Address, LogConnection] = {}
        self.topic_ids: dict[str, str | None] = {}
        self._brokers: dict[int, Address] = {}
        self._leaders: dict[TopicPartition, Address] = {}

    def __enter__(self) -> LogClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def patience(self) -> Patience:
        return Patience(self._patience_s, self._clock, self._sleep)

    def remember_leader(self, which: TopicPartition, leader: Address) -> None:
        """Set the leader that the planner has just learned."""
        self._leaders[which] = leader

    def leader(self, which: TopicPartition) -> Address | None:
        """Return the remembered leader, if any."""
        return self._leaders.get(which)

    def forget_leader(self, which: TopicPartition) -> None:
        """Ask for Metadata before the next request: the broker may be a follower by now, and lag behind."""
        self._leaders.pop(which, None)

    def partitions(self, topics: Collection[str] | None) -> dict[str, int]:
        """Return the number of partitions by topic; of all topics for None.

        Raise LogReadFailed if no broker answers or a topic does not exist.
        """
        known = self.partitions_if_any(topics)
        missing = min(set(topics or ()) - known.keys(), default=None)
        if missing is not None:
            raise LogReadFailed(f"There is no topic {missing} at {','.join(map(str, self._bootstrap))}.")
        return known

    def partitions_if_any(self, topics: Collection[str] | None) -> dict[str, int]:
        """Return the number of partitions of those topics that exist.

        Brokers must deny that the others exist. Raise LogReadFailed for any other error, for example if a topic may not
        be read.
        """
        patience = self.patience()
        tries = UNKNOWN_TOPIC_TRIES
        while True:
            found = self._ask_metadata(topics, patience)
            known = {_name(each): each.partition_count for each in found if each.partition_count}
            reasons = {_name(each): each.error_code for each in found}
            missing = {
                topic: reasons.get(topic, error_codes.UNKNOWN_TOPIC_OR_PARTITION)
                for topic in sorted(set(topics or ()) - known.keys())
            }
            tries -= 1
            pending = [topic for topic, code in missing.items() if code not in _NO_SUCH_TOPIC or tries > 0]
            if not pending:
                return known
            for topic in pending:
                if missing[topic] not in error_codes.PASSING | _NO_SUCH_TOPIC:
                    raise LogReadFailed(f"Topic {topic} cannot be read: {error_codes.name_of(missing[topic])}.")
            patience.pause(f"Metadata of {', '.join(pending)} is not to be had")

    def list_offsets(
        self, partitions: Iterable[TopicPartition], timestamp: int, unread: dict[TopicPartition, str] | None = None
    ) -> dict[TopicPartition, int]:
        """Return the first offsets of logs (EARLIEST) or those after the last records (LATEST, the high watermarks).

        For a time in milliseconds, return the first offset with that timestamp or a later one, -1 if there is none.
        Raise LogReadFailed; with `unread`, add the partitions that have no leader or are refused, with the reason.
        """
        offsets: dict[TopicPartition, int] = {}
        pending = dict.fromkeys(partitions, "nobody was asked")
        patience = self.patience()
        while pending:
            leaders = self._by_leader(list(pending), patience, pending if unread is not None else None)
            for leader, asked in leaders.items():
                for first in range(0, len(asked), PARTITIONS_PER_QUESTION):
                    part = asked[first : first + PARTITIONS_PER_QUESTION]
                    offsets.update(self._list_offsets(leader, part, timestamp, pending, unread))
            if any(which in offsets for which in pending):
                patience.succeeded()
            done = offsets.keys() | (unread or {}).keys()
            pending = {which: reason for which, reason in pending.items() if which not in done}
            if pending:
                which, reason = next(iter(pending.items()))
                try:
                    patience.pause(f"The offsets of {which} are not to be had ({reason})")
                except LogReadFailed:
                    if unread is None:
                        raise
                    unread.update(pending)
                    break
        return offsets

    def _list_offsets(
        self,
        leader: Address,
        asked: Sequence[TopicPartition],
        timestamp: int,
        reasons: dict[TopicPartition, str],
        unread: dict[TopicPartition, str] | None,
    ) -> dict[TopicPartition, int]:
        """Return the offsets in a leader's answer. For those missing, add the reason and forget the leader."""
        by_topic: dict[str, list[dict[str, int]]] = defaultdict(list)
        for topic, partition in asked:
            wanted = {"partition_index": partition, "current_leader_epoch": -1, "timestamp": timestamp}
            by_topic[topic].append(wanted)
        topics = [{"name": topic, "partitions": wanted} for topic, wanted in by_topic.items()]
        try:
            answer = self._connection(leader).ask(
                keys.LIST_OFFSETS, _LIST_OFFSETS_VERSION, replica_id=-1, isolation_level=0, topics=topics
            )
        except BrokerFailed as error:
            self._forget(leader)
            reasons.update(dict.fromkeys(asked, str(error)))
            return {}
        offsets = {}
        for topic in answer.topics:
            for result in topic.partitions:
                which = TopicPartition(topic.name, result.partition_index)
                if result.error_code == error_codes.NONE:
                    offsets[which] = result.offset
                    continue
                self.forget_leader(which)
                reasons[which] = error_codes.name_of(result.error_code)
                if result.error_code in error_codes.PASSING:
                    continue
                if unread is None:
                    raise LogReadFailed(f"The offsets of {which} cannot be read: {reasons[which]}.")
                unread[which] = reasons[which]
        return offsets

    def compacted(self, topics: Collection[str]) -> set[str]:
        """Return the compacted ones of `topics`; none if brokers do not serve DescribeConfigs. Raise LogReadFailed."""
        asked = [
            {"resource_type": _TOPIC, "resource_name": topic, "configuration_keys": [_CLEANUP_POLICY]}
            for topic in sorted(topics)
        ]
        compacted: set[str] = set()
        for first in range(0, len(asked), PARTITIONS_PER_QUESTION):
            compacted |= self._compacted(asked[first : first + PARTITIONS_PER_QUESTION])
        return compacted

    def _compacted(self, resources: list[dict[str, Any]]) -> set[str]:
        patience = self.patience()
        while True:
            try:
                with self._any_connection() as connection:
                    if not connection.serves(keys.DESCRIBE_CONFIGS):
                        return set()
                    answer = connection.ask(keys.DESCRIBE_CONFIGS, _DESCRIBE_CONFIGS_VERSION, resources=resources)
            except BrokerFailed as error:
                patience.pause(f"Which topics are compacted is not to be had ({error})")
                continue
            refused = [each for each in answer.results if each.error_code != error_codes.NONE]
            if not refused:
                return {each.resource_name for each in answer.results if any(map(_says_compact, each.configs))}
            which, code = refused[0].resource_name, refused[0].error_code
            reason = f"Whether topic {which} is compacted cannot be read: {error_codes.name_of(code)}"
            if code not in error_codes.PASSING:
                raise LogReadFailed(f"{reason}; name the compacted topics with --compacted.")
            patience.pause(reason)

    def fetch(self, which: TopicPartition, offset: int, max_bytes: int, patience: Patience) -> PartitionFetched:
        """Return the batches of a partition from `offset` on, or an error code that is not a passing one.

        Raise LogReadFailed when `patience` is exhausted.
        """
        while True:
            try:
                leader = next(iter(self._by_leader([which], patience)))
                fetched = self._connection(leader).fetch(which.topic, which.partition, offset, max_bytes)
                if fetched.error_code not in error_codes.PASSING:
                    return fetched
                self.forget_leader(which)
                reason = f"{leader} says {error_codes.name_of(fetched.error_code)}"
            except BrokerFailed as error:
                self._forget(leader)
                reason = str(error)
            patience.pause(f"Batches of {which} from offset {offset} on are not to be had ({reason})")

    def _by_leader(
        self,
        partitions: Sequence[TopicPartition],
        patience: Patience,
        reasons: dict[TopicPartition, str] | None = None,
    ) -> dict[Address, list[TopicPartition]]:
        """Group the partitions by leader; ask for Metadata for unknown leaders.

        Wait for leaders; with `reasons`, leave out partitions that have none now, and say so there.
        """
        while unknown := [which for which in partitions if which not in self._leaders]:
            for found in self._ask_metadata({which.topic for which in unknown}, patience):
                for _, index, leader_id, _ in found.partitions():
                    if leader_id in self._brokers:
                        self._leaders[TopicPartition(_name(found), index)] = self._brokers[leader_id]
            leaderless = next((which for which in unknown if which not in self._leaders), None)
            if leaderless is not None and reasons is None:
                patience.pause(f"{leaderless} has no leader")
            elif reasons is not None:
                reasons.update((which, "it has no leader") for which in unknown if which not in self._leaders)
                partitions = [which for which in partitions if which in self._leaders]
        by_leader: dict[Address, list[TopicPartition]] = defaultdict(list)
        for which in partitions:
            by_leader[self._leaders[which]].append(which)
        return by_leader

    def _ask_metadata(self, topics: Collection[str] | None, patience: Patience) -> list[TopicLeaders]:
        wanted = None if topics is None else [{"name": topic} for topic in sorted(topics)]
        while True:
            try:
                with self._any_connection() as connection:
                    version, frame = connection.exchange(
                        keys.METADATA, HIGHEST_VERSION, topics=wanted, allow_auto_topic_creation=False
                    )
                reader = MetadataReader(frame[response_body_offset(frame, keys.METADATA, version) :], version)
                while not reader.read_some(1 << 20):
                    pass
            except (BrokerFailed, CodecError) as error:
                patience.pause(str(error))
                continue
            self._brokers = {node_id: Address(host, port) for node_id, host, port in reader.brokers}
            self.topic_ids |= {_name(each): each.topic_id.hex() if each.topic_id else None for each in reader.topics}
            return reader.topics

    @contextmanager
    def _any_connection(self) -> Iterator[LogConnection]:
        """Yield a connection to any broker, preferably an open one.

        If all fail, raise BrokerFailed that names them. If the request in the block fails, the next call uses another
        broker.
        """
        failures = []
        for address in dict.fromkeys([*self._connections, *self._bootstrap, *self._brokers.values()]):
            try:
                connection = self._connection(address)
                break
            except BrokerFailed as error:
                failures.append(str(error))
        else:
            raise BrokerFailed("; ".join(failures))
        try:
            yield connection
        except BrokerFailed:
            self._forget(address)
            raise

    def _connection(self, address: Address) -> LogConnection:
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = LogConnection(address, self._timeout_s, self._clock, self._access)
        return connection

    def _forget(self, address: Address) -> None:
        """Close a failed broker's connection and forget what it leads, until Metadata names it again."""
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()
        self._leaders = {which: leader for which, leader in self._leaders.items() if leader != address}


def _name(topic: TopicLeaders) -> str:
    return (topic.name or b"").decode()


def _says_compact(config: Any) -> bool:
    return config.name == _CLEANUP_POLICY and "compact" in (config.value or "")
