"""Model single ownership of one partition sequentially, and judge the clients' records by the model.

A claim has two effects, one after the other, both between its call and its answer. First it is decided: from then on it
is compared with other claims. Then it takes the partition: from then on only its connection may write. In between the
earlier writer may still write, but no client is told that it owns the partition. So a claim is two operations, `Decide`
and `Take`, with the same times.

The model implements the table of the wiki's "Single Reader/Writer" independently of `kproxy.claims`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kproxy_codec import error_codes
from tests.support.clients.attempts import REFUSED, Stored
from tests.support.models.linearizability import NEVER, UNKNOWN, Operation, check

NOBODY: Final = ""
# Errors that are answered before the append.
NOT_APPENDED: Final = REFUSED | {error_codes.POLICY_VIOLATION}


# Inputs and outputs


class Decide(NamedTuple):
    """`connection` claims with `generation`."""

    connection: str
    generation: int


class Take(NamedTuple):
    """A decided claim is confirmed and bound."""

    connection: str


class Granted(NamedTuple):
    generation: int
    fence: int


class Fenced(NamedTuple):
    """The owner has a higher generation."""


class Write(NamedTuple):
    """One write. `fence` is the last one granted to its writer; 0 if it owned nothing."""

    connection: str
    fence: int
    value: bytes


class Appended(NamedTuple):
    """The record is in the log, directly after the record at `after`; -1 for the first."""

    offset: int
    after: int


class Refusal(NamedTuple):
    """The sender is not the owner."""


class End(NamedTuple):
    """The end of a connection, which frees its resources."""

    connection: str


class Owned(NamedTuple):
    """`owner` by the claim decided last, and its fence; above `fence` if no client was told.

    `writer` and its fence are by the claim that took the partition last; `offset` is that of the last record.
    """

    owner: str = NOBODY
    generation: int = 0
    fence: int = 0
    fence_is_known: bool = True
    writer: str = NOBODY
    writer_fence: int = 0
    writer_fence_is_known: bool = True
    offset: int = -1


class OwnModel:
    """A model (linearizability.Model) of one partition that its writer group gates."""

    initial = Owned()

    def step(self, state: Owned, operation: Operation) -> Iterable[Owned]:
        asked, told = operation.input, operation.output
        if isinstance(asked, Decide):
            return _decide(state, asked, told)
        if isinstance(asked, Take):
            return _take(state, asked, told)
        if isinstance(asked, Write):
            return _write(state, asked, told)
        assert isinstance(asked, End)
        return (
            [state._replace(owner=NOBODY, generation=0, fence_is_known=True)] if state.owner == asked.connection else []
        )


def _decide(state: Owned, asked: Decide, told: Granted | Fenced | None) -> list[Owned]:
    connection, generation = asked
    if generation and state.owner != NOBODY:
        if generation < state.generation:
            return [state] if isinstance(told, Fenced) else []
        if connection == state.owner and generation == state.generation:
            return _found_again(state, told)
    else:
        generation = 1
    claimed = state._replace(owner=connection, generation=generation, fence_is_known=told is not UNKNOWN)
    if told is UNKNOWN:
        return [claimed]
    if isinstance(told, Granted) and told.generation == generation and told.fence > state.fence:
        return [claimed._replace(fence=told.fence)]
    return []


def _found_again(state: Owned, told: Granted | Fenced | None) -> list[Owned]:
    """The states after the owner has claimed the partition again with the same generation."""
    if not isinstance(told, Granted) or told.generation != state.generation:
        return []
    if state.fence_is_known:
        return [state] if told.fence == state.fence else []
    return [state._replace(fence=told.fence, fence_is_known=True)] if told.fence > state.fence else []


def _take(state: Owned, asked: Take, told: Granted | None) -> list[Owned]:
    if not isinstance(told, Granted):
        # The claim's fence is unknown, but above all fences that existed when the claim was decided.
        taken = state._replace(writer=asked.connection, writer_fence_is_known=False)
        return [taken] if state.owner == asked.connection else []
    is_decided = told.fence <= state.fence or not state.fence_is_known
    if not is_decided or told.fence < state.writer_fence:
        return []
    return [state._replace(writer=asked.connection, writer_fence=told.fence, writer_fence_is_known=True)]


def _write(state: Owned, asked: Write, told: Appended | Refusal | None) -> list[Owned]:
    writes = state.writer == asked.connection
    if isinstance(told, Refusal):
        return [] if writes and state.owner == asked.connection else [state]
    if not isinstance(told, Appended) or not writes:
        return []
    is_behind_its_fence = asked.fence <= state.writer_fence or not state.writer_fence_is_known
    return [state._replace(offset=told.offset)] if is_behind_its_fence and told.after == state.offset else []


# Records of the clients


class Claimed(NamedTuple):
    """A claim and its outcome; `told` is UNKNOWN if the client got no answer."""

    who: str
    called: float
    returned: float
    connection: str
    generation: int
    told: Granted | Fenced | None


class Written(NamedTuple):
    """One record; `error_code` None: there was no answer. `fence` as in Write. `may_be_lost`: acks below all."""

    who: str
    called: float
    returned: float
    connection: str
    fence: int
    value: bytes
    error_code: int | None
    offset: int = -1
    may_be_lost: bool = False


class Recorded(NamedTuple):
    """All records about one partition.

    `ends_from` has for every connection the time from which its partitions may have been free: when its client closed
    it or its proxy had a fault; NEVER if it is open and has had none. `read_at`: the time when the log was read.
    """

    claims: Sequence[Claimed]
    writes: Sequence[Written]
    ends_from: Mapping[str, float]
    read_at: float


def judge(recorded: Recorded, log: Sequence[Stored]) -> None:
    """Compare the answers of clients with the log and with the model. Raises AssertionError with the reason."""
    at = places(log)
    _judge_writes(recorded.writes, at)
    _judge_log(recorded.writes, log)
    _judge_grants(recorded.claims)
    refuted = check(operations(recorded, at), OwnModel())
    assert refuted is None, f"not linearizable: {refuted}"


def places(log: Sequence[Stored]) -> dict[bytes, int]:
    """The offset of each value. Raise AssertionError for a value that occurs twice."""
    found: dict[bytes, int] = {}
    for offset, value in log:
        assert value not in found, f"{value!r} is at {found[value]} and at {offset}"
        found[value] = offset
    return found


def _judge_writes(writes: Iterable[Written], places: Mapping[bytes, int]) -> None:
    """An acknowledged value is at its offset; a refused one is not in the log."""
    for each in writes:
        place = places.get(each.value)
        if each.error_code == error_codes.NONE and not (each.may_be_lost and place is None):
            assert place == each.offset, f"{each.value!r}, acknowledged at {each.offset}, is at {place}"
        if each.error_code in NOT_APPENDED:
            assert place is None, f"{each.value!r} was refused with {each.error_code}, and is at {place}"


def _judge_log(writes: Iterable[Written], log: Sequence[Stored]) -> None:
    """No record has a lower fence than the record before it."""
    fences = {each.value: each.fence for each in writes}
    highest, first = 0, Stored(-1, b"")
    for record in log:
        assert record.value in fences, f"{record} was written by nobody"
        fence = fences[record.value]
        assert fence > 0, f"{record} is in the log, and its writer owned nothing"
        assert fence >= highest, f"{record}, of fence {fence}, stands behind {first}, of fence {highest}"
        if fence > highest:
            highest, first = fence, record


def _judge_grants(claims: Iterable[Claimed]) -> None:
    """A fence belongs to one connection, and is not below any fence granted before its claim was sent."""
    granted = sorted((each for each in claims if isinstance(each.told, Granted)), key=lambda each: each.returned)
    owners: dict[int, Claimed] = {}
    for each in granted:
        assert isinstance(each.told, Granted)
        earlier = owners.setdefault(each.told.fence, each)
        assert earlier.connection == each.connection, f"one fence, two owners: {earlier} and {each}"
    highest: Claimed | None = None
    by_call = sorted(granted, key=lambda each: each.called)
    done = iter(granted)
    following = next(done, None)
    for each in by_call:
        while following is not None and following.returned < each.called:
            if highest is None or _fence(following) > _fence(highest):
                highest = following
            following = next(done, None)
        assert highest is None or _fence(each) >= _fence(highest), f"a fence went back: {each} after {highest}"


def _fence(claim: Claimed) -> int:
    return claim.told.fence if isinstance(claim.told, Granted) else 0


def operations(recorded: Recorded, places: Mapping[bytes, int]) -> list[Operation]:
    """Operations for the checker. Records in the log were appended, whatever the answer; others changed nothing."""
    found: list[Operation] = []
    ends_from = recorded.ends_from
    # Whether a client has taken the partition without being told shows only in its records.
    writers = {each.connection for each in recorded.writes if each.value in places}
    in_order = sorted(places.values())
    after = dict(zip(in_order, [-1, *in_order], strict=False))
    for claim in recorded.claims:
        is_told = claim.told is not UNKNOWN
        # An unanswered claim may take effect at any later time. Allowing it to do so repeatedly makes the search
        # smaller, because the search need not remember whether it has happened.
        times = {"called": claim.called, "returned": claim.returned if is_told else NEVER, "repeats": not is_told}
        decide = Decide(claim.connection, claim.generation)
        found.append(Operation(claim.who, input=decide, output=claim.told, **times))
        if isinstance(claim.told, Granted) or (not is_told and claim.connection in writers):
            found.append(Operation(claim.who, input=Take(claim.connection), output=claim.told, **times))
    for write in recorded.writes:
        asked = Write(write.connection, write.fence, write.value)
        place = places.get(write.value)
        if place is not None:
            # Whatever the answer, the record was there when the log was read.
            returned = write.returned if write.error_code == error_codes.NONE else recorded.read_at
            found.append(Operation(write.who, write.called, returned, asked, Appended(place, after[place])))
        elif write.error_code == error_codes.POLICY_VIOLATION and write.returned < ends_from[write.connection]:
            # The refusal proves nothing about later times: a connection may lose its partitions before it learns so.
            found.append(Operation(write.who, write.called, write.returned, asked, Refusal()))
    # A claim may be decided after the end of its connection and then be undone, so a free partition may be freed again.
    found += [
        Operation(connection, since, NEVER, End(connection), repeats=True)
        for connection, since in ends_from.items()
        if since != NEVER and any(claim.connection == connection for claim in recorded.claims)
    ]
    return found
