"""One blocking connection to a Kafka broker, for reading logs.

It sends one request at a time. Spark's executors use it, so it needs only the standard library, `kproxy_codec` and
kafka-python, which executors get as pure Python. An answer's bytes are valid until the next request, as the buffer is
reused.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from kproxy.routing.topology import Address
from kproxy_codec import api_keys as keys
from kproxy_codec.control import Message, build_request, decode_response, encode_request, version_range
from kproxy_codec.correlation import AwaitedAnswers
from kproxy_codec.errors import CodecError, FrameTooLarge
from kproxy_codec.fetch import FINAL_EPOCH, MIN_VERSION, NO_SESSION, PartitionFetched
from kproxy_codec.fetch_answer import MAX_VERSION, read_fetch_answer
from kproxy_codec.foreign import ANSWER_TO_HTTP, answered_in
from kproxy_codec.framing import FrameReader, frame_message, request_header, response_body_offset

CLIENT_ID: Final = b"kproxy-audit"
# Brokers send the first batch whole, however large: the most that an answer may exceed the requested bytes.
LARGEST_BATCH_BYTES: Final = 128 << 20
# Enough for the Metadata answer of a large cluster.
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
    """Send requests to one broker. `timeout_s` bounds connecting and each answer, in seconds."""

    def __init__(self, address: Address, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Connect and ask for the broker's API versions. Raise BrokerFailed, or LogReadFailed if it is not a broker."""
        self.address = address
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
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            answer = self.ask(keys.API_VERSIONS, 0)
        except BrokerFailed:
            self.close()
            self._expect_no_http()
            raise
        except LogReadFailed:
            self.close()
            raise
        self._has_answered = True
        self._offered = {api.api_key: (api.min_version, api.max_version) for api in answer.api_keys}

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
        return version, self._exchange(api_key, version, MAX_CONTROL_BYTES, fields)

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
        frame = self._exchange(keys.FETCH, version, max_bytes + LARGEST_BATCH_BYTES, fields)
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

    def _exchange(self, api_key: int, version: int, most_bytes: int, fields: Mapping[str, Any]) -> memoryview:
        try:
            correlation_id = self._awaited.next_id()
            header = request_header(api_key, version, correlation_id, CLIENT_ID)
            body = encode_request(build_request(api_key, version, **fields))
            self._awaited.sent(correlation_id, None)
            self._frames.admit(most_bytes)
            deadline = self._clock() + self._timeout_s
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(frame_message(header, body))
            if not self._has_answered and not self._begins_to_answer():
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
            raise LogReadFailed(f"{self.address} speaks {protocol}: give the address of a plain Kafka listener.")

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
