"""Decide whether a failed partition of a request is sent again, and which error its client gets (the retry table).

An event is a Kafka error code that a broker answered, or a failure of a connection or answer. Each row says what the
proxy does with one partition's part of a request. Produce is strict: a batch that may have been appended must not be
sent again unless the broker would recognise it. Fetch and ListOffsets change nothing and may always be asked again.

Answers leave in the order of requests, so an entry that waits for its retry delays every later answer of its client.
Two further bounds, counted from the entry's first failure, therefore apply to every row: WAIT_S for entries refused
before the append, AMBIGUOUS_WAIT_S for entries that may have been appended and whose lane must wait. After that the
client gets the code and follows its own retry policy.

An event that casts doubt on the owner starts a lookup. Attempts before its end do not count for MAX_ATTEMPTS, because
the table could not correct them; the back-off grows with each, and the time limits stay.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from kproxy.routing.topology import NO_OWNER
from kproxy_codec import error_codes as codes
from kproxy_codec.api_keys import PRODUCE as PRODUCE_KEY

# Events other than Kafka's 16-bit error codes.
NOT_WRITTEN: Final = 1 << 16
"""The dial failed, or no byte of the piece was written: no broker has seen it."""
CONNECTION_LOST: Final = NOT_WRITTEN + 1
"""The connection ended with the piece written and unanswered."""
UNREADABLE: Final = NOT_WRITTEN + 2
"""The broker's bytes are not an answer to this piece."""

_EVENT_NAMES: Final = {NOT_WRITTEN: "NOT_WRITTEN", CONNECTION_LOST: "CONNECTION_LOST", UNREADABLE: "UNREADABLE"}

ALL_ACKS: Final = -1
# Attempts at one owner, and in total if a partition moves between attempts.
MAX_ATTEMPTS: Final = 3
MAX_ATTEMPTS_IN_ALL: Final = 9
BACKOFF_S: Final = (0.02, 0.1, 0.25, 0.5)
WAIT_S: Final = 1.0
"""How long after an entry's first failure it may be resent, in seconds."""
AMBIGUOUS_WAIT_S: Final = 3.0
"""The same for an entry that a broker may have appended."""
NO_OFFSET: Final = -1


class Attempts:
    """The failed attempts of an entry.

    `in_all` counts all, `here` those since its partition's owner last changed, `blind` those of `here` that were sent
    before the owner was looked up. `refused_by`: the brokers that answered NOT_LEADER_OR_FOLLOWER; `sent_to`: the last
    receiver.
    """

    __slots__ = (
        "_is_blind",
        "_owner_version",
        "blind",
        "first_failed_at",
        "here",
        "in_all",
        "refused_by",
        "sent_to",
    )

    def __init__(self) -> None:
        self.in_all = 0
        self.here = 0
        self.blind = 0
        self._is_blind = False
        self.first_failed_at = 0.0
        self._owner_version = -1
        self.refused_by: frozenset[int] = frozenset()
        self.sent_to = NO_OWNER

    def send_blindly(self, owner_version: int) -> None:
        """Note that the next attempt is sent while the owner is being read again.

        `owner_version` is the ownership's now: the table may have changed since the last failure.
        """
        self._is_blind = bool(self.in_all) and owner_version == self._owner_version

    def add(self, routed_at: int, owner_version: int, now: float) -> None:
        """Count an attempt sent at the topology's version `routed_at`.

        `owner_version` is the ownership's now. `now` is in seconds of the proxy's clock.
        """
        if not self.in_all:
            self.first_failed_at = now
        self.in_all += 1
        if owner_version != self._owner_version:
            self._owner_version = owner_version
            self.here = self.blind = 0
        if owner_version <= routed_at:
            self.here += 1
            self.blind += self._is_blind
        self._is_blind = False

    @property
    def exhausted(self) -> bool:
        return self.here - self.blind >= MAX_ATTEMPTS or self.in_all >= MAX_ATTEMPTS_IN_ALL

    def due_s(self, jitter: float) -> float:
        """Seconds to wait before the same owner is tried again; `jitter` as in `backoff_s`."""
        return backoff_s(max(self.here, 1), jitter)

    def soonest_s(self, jitter: float) -> float:
        """Seconds to wait before another owner is tried: none at first, a back-off if the partition keeps moving."""
        return 0.0 if self.in_all <= 1 else backoff_s(1, jitter)


class RetryLimit(Enum):
    """The limit of a row's retries."""

    NEVER = "never"
    ATTEMPTS = "until the attempts are exhausted, or the time for waiting is over"
    TIME = "until the time for waiting is over"


class RetryRule(NamedTuple):
    """One row: `final` is the client's code if no (further) retry is allowed; None passes on the event's own code."""

    bound: RetryLimit
    final: int | None
    ambiguous: bool = False


_PASS_THROUGH = RetryRule(RetryLimit.NEVER, None)


class BrokerSemantics(NamedTuple):
    """The behaviour of brokers that decides about resending.

    Each ownership source has brokers of one semantics. `refuses_before_append`: they answer NOT_LEADER_OR_FOLLOWER only
    before anything is appended, whatever the acks and the base offset. `keeps_producer_state`: they recognise a batch
    with a producer id that was appended before, even on a new owner.
    """

    refuses_before_append: bool
    keeps_producer_state: bool


LEASED: Final = BrokerSemantics(refuses_before_append=True, keeps_producer_state=True)
"""Reference brokers: an owner holds a lease and checks it before it appends."""
KAFKA: Final = BrokerSemantics(refuses_before_append=False, keeps_producer_state=True)
"""Apache Kafka: with acks=all a leader that is deposed while it waits for its followers returns this error after its
append. That answer has the base offset; a refusal before the append has none."""

PRODUCE: Final[dict[int, RetryRule]] = {
    NOT_WRITTEN: RetryRule(RetryLimit.ATTEMPTS, codes.NOT_LEADER_OR_FOLLOWER),
    codes.NOT_LEADER_OR_FOLLOWER: RetryRule(RetryLimit.ATTEMPTS, None),
    # Answered before the append. Clients may know a topic sooner than its brokers or the proxy do.
    codes.UNKNOWN_TOPIC_ID: RetryRule(RetryLimit.ATTEMPTS, None),
    codes.LEADER_NOT_AVAILABLE: RetryRule(RetryLimit.TIME, None),
    codes.NOT_ENOUGH_REPLICAS: RetryRule(RetryLimit.TIME, None),
    codes.REQUEST_TIMED_OUT: RetryRule(RetryLimit.TIME, codes.REQUEST_TIMED_OUT, ambiguous=True),
    codes.NETWORK_EXCEPTION: RetryRule(RetryLimit.TIME, codes.REQUEST_TIMED_OUT, ambiguous=True),
    codes.NOT_ENOUGH_REPLICAS_AFTER_APPEND: RetryRule(RetryLimit.TIME, codes.REQUEST_TIMED_OUT, ambiguous=True),
    CONNECTION_LOST: RetryRule(RetryLimit.TIME, codes.REQUEST_TIMED_OUT, ambiguous=True),
    UNREADABLE: RetryRule(RetryLimit.TIME, codes.REQUEST_TIMED_OUT, ambiguous=True),
}

_UNCLEAR = RetryRule(RetryLimit.TIME, codes.REQUEST_TIMED_OUT, ambiguous=True)

# acks=all, for brokers that may append before they answer these.
PRODUCE_UNCLEAR: Final[dict[int, RetryRule]] = {
    **PRODUCE,
    codes.NOT_LEADER_OR_FOLLOWER: _UNCLEAR,
    codes.UNKNOWN_TOPIC_OR_PARTITION: _UNCLEAR,
    codes.KAFKA_STORAGE_ERROR: _UNCLEAR,
}
# The same for an answer without a base offset: Kafka sets an error after its append without removing the offset
# (DelayedProduce), so this was refused before. A failed flush (error 56) has no offset either, but after an append.
PRODUCE_REFUSED: Final[dict[int, RetryRule]] = {
    **PRODUCE_UNCLEAR,
    codes.NOT_LEADER_OR_FOLLOWER: RetryRule(RetryLimit.ATTEMPTS, None),
    codes.UNKNOWN_TOPIC_OR_PARTITION: RetryRule(RetryLimit.ATTEMPTS, None),
}

READ: Final[dict[int, RetryRule]] = {
    NOT_WRITTEN: RetryRule(RetryLimit.ATTEMPTS, codes.NOT_LEADER_OR_FOLLOWER),
    codes.NOT_LEADER_OR_FOLLOWER: RetryRule(RetryLimit.ATTEMPTS, None),
    codes.LEADER_NOT_AVAILABLE: RetryRule(RetryLimit.ATTEMPTS, None),
    CONNECTION_LOST: RetryRule(RetryLimit.ATTEMPTS, codes.NOT_LEADER_OR_FOLLOWER),
    UNREADABLE: RetryRule(RetryLimit.ATTEMPTS, codes.NOT_LEADER_OR_FOLLOWER),
}


_SAY_NOT_APPENDED = frozenset(
    {
        codes.NOT_LEADER_OR_FOLLOWER,
        codes.LEADER_NOT_AVAILABLE,
        codes.NOT_ENOUGH_REPLICAS,
        codes.UNKNOWN_TOPIC_ID,
        codes.UNKNOWN_TOPIC_OR_PARTITION,
    }
)
# Retriable errors of Kafka's clients: the client resends the same batch by itself.
_COMES_AGAIN = _SAY_NOT_APPENDED | {
    codes.CORRUPT_MESSAGE,
    codes.REQUEST_TIMED_OUT,
    codes.NETWORK_EXCEPTION,
    codes.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    codes.KAFKA_STORAGE_ERROR,
    codes.FENCED_LEADER_EPOCH,
    codes.UNKNOWN_LEADER_EPOCH,
    codes.THROTTLING_QUOTA_EXCEEDED,
}
_HELD_BACK = frozenset(
    {
        codes.NOT_LEADER_OR_FOLLOWER,
        codes.NOT_ENOUGH_REPLICAS,
        codes.OUT_OF_ORDER_SEQUENCE_NUMBER,
        codes.UNKNOWN_TOPIC_ID,
        codes.UNKNOWN_TOPIC_OR_PARTITION,
    }
)
_DOUBTS_THE_OWNER = frozenset(
    {
        NOT_WRITTEN,
        CONNECTION_LOST,
        UNREADABLE,
        codes.UNKNOWN_TOPIC_OR_PARTITION,
        codes.LEADER_NOT_AVAILABLE,
        codes.NOT_LEADER_OR_FOLLOWER,
        codes.REPLICA_NOT_AVAILABLE,
        codes.NETWORK_EXCEPTION,
        codes.KAFKA_STORAGE_ERROR,
        codes.FENCED_LEADER_EPOCH,
        codes.UNKNOWN_LEADER_EPOCH,
        codes.UNKNOWN_TOPIC_ID,
    }
)


def rows_of(
    api_key: int, acks: int, semantics: BrokerSemantics, base_offset: int | None = None
) -> dict[int, RetryRule]:
    """The rules for an entry; `base_offset` is from the broker's answer, None without an answer."""
    if api_key != PRODUCE_KEY:
        return READ
    if semantics.refuses_before_append or acks != ALL_ACKS:
        return PRODUCE
    return PRODUCE_REFUSED if base_offset == NO_OFFSET else PRODUCE_UNCLEAR


def event_name(event: int) -> str:
    """The name of the error code or failure."""
    return _EVENT_NAMES.get(event) or codes.name_of(event)


def is_ambiguous(rows: dict[int, RetryRule], event: int) -> bool:
    """Whether the broker may have appended the entry."""
    return rows.get(event, _PASS_THROUGH).ambiguous


class Decision(NamedTuple):
    """Either a retry, at most `wait_s` seconds after the entry's first failure, or `error_code` for the client."""

    retry: bool
    error_code: int
    wait_s: float = WAIT_S


def decide(rows: dict[int, RetryRule], event: int, *, exhausted: bool, resend_is_safe: bool) -> Decision:
    """Decide about `event`; `exhausted` as in Attempts.

    `resend_is_safe`: the broker would recognise the batch as a duplicate, because it has a producer id and is not
    transactional, and the upstream rebuilds its producer state from its log. Only ambiguous rows need it.
    """
    row = rows.get(event, _PASS_THROUGH)
    final = event if row.final is None else row.final
    if row.bound is RetryLimit.NEVER or (row.bound is RetryLimit.ATTEMPTS and exhausted):
        return Decision(retry=False, error_code=final)
    wait_s = AMBIGUOUS_WAIT_S if row.ambiguous else WAIT_S
    return Decision(retry=resend_is_safe or not row.ambiguous, error_code=final, wait_s=wait_s)


def final_code(error_code: int, *, is_ambiguous: bool) -> int:
    """The code for the client: a refusal of one attempt does not rule out that an earlier one was appended."""
    if is_ambiguous and error_code in _SAY_NOT_APPENDED:
        return codes.REQUEST_TIMED_OUT
    return error_code


def doubts_the_owner(event: int) -> bool:
    """Whether the owner may have changed and must be looked up."""
    return event in _DOUBTS_THE_OWNER


def comes_again(error_code: int) -> bool:
    """Whether a client resends the same batch after this code.

    Batches behind it must not be sent first: a broker without the producer's state would take them for the first.
    """
    return error_code in _COMES_AGAIN


def is_held_back(error_code: int) -> bool:
    """Whether a batch refused with this code behind a refused one is resent behind it."""
    return error_code in _HELD_BACK


def backoff_s(attempts: int, jitter: float) -> float:
    """Seconds to wait after `attempts` attempts; `jitter` in [0, 1) lengthens it by up to a half."""
    return BACKOFF_S[min(attempts, len(BACKOFF_S)) - 1] * (1 + jitter / 2)


def deadline_s(timeout_ms: int, cap_ms: int) -> float:
    """Seconds from a request's first byte to its deadline: before the client's own timer, but at least 1 s."""
    return max(1.0, 0.9 * min(timeout_ms, cap_ms) / 1000)
