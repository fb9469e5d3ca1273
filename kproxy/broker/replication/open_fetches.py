"""Answer the fetches of one follower's connection, as the leader: keep its questions open until there is news.

A follower asks once for each partition. Its question stays open, over any number of requests and answers, until an
answer names the partition; then the follower asks again. So a request names only new questions, an answer names only
partitions with news, and a partition without news costs nothing.

States of a question
  ready   there may be something to answer: it is new; or records were appended, the high watermark or the log's start
          has moved, or the partition was closed
  idle    there was nothing to answer; the partition calls when there is
  ended   it gets no more answers

Transitions
  (asked) -> ready       the follower's report counts at once, even if the question is answered later
  ready -> idle          a look found no news
  idle -> ready          the partition called
  ready, idle -> ended   it is answered, asked again or withdrawn, or the connection has closed

Invariants
1. A question is answered at most once. Questions that do not fit into an answer stay ready, before any later ones.
2. No question outlives the connection. A follower that reconnects asks for everything again, also after a restart of
   the leader.
3. While a question is idle, the follower has the whole log. Its log changes only by our answer, so each of its requests
   confirms this again, unless it withdraws the question: it has caught up as of its last request (FollowerContact).
   From the next append on, the time of that request counts. A follower that is dead, frozen or cut off sends none.
4. Appends, errors and divergences are answered at once. A moved high watermark or log start waits for the next answer,
   at most as long as the request allows: the followers' own progress moves the high watermark, and would double the
   number of answers.
5. An answer has at most MAX_PARTITIONS partitions. Its first batch is whole, however large; otherwise the limits of the
   request, of each partition and of this broker hold. The last batch may be partial.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from kproxy.broker.context import Body, Broker, CloseConnection, Request
from kproxy.broker.partition import Partition
from kproxy.broker.replication.partition_replication import FollowerContact
from kproxy.etcd.lease import Clock
from kproxy_codec import error_codes
from kproxy_codec.fetch import (
    OPEN_EPOCH,
    PartitionFetch,
    PartitionFetched,
    parse_fetch,
    partition_fetch,
    response_ends,
    result_entry,
)
from kproxy_codec.partitioned import MAX_PARTITIONS, encode_topics
from kproxy_codec.primitives import Buffer
from kproxy_codec.replica_fetch import VERSION

# The longest wait, also for clients: a lost client must not occupy the broker for long.
MAX_WAIT_MS = 60_000

_Key = tuple[bytes, int]
"""A topic's id, and the partition index."""
# The (high watermark, log start offset) of a follower that has no report yet.
_NOTHING = (-1, -1)


class Asked(NamedTuple):
    """One question; `partition` is None if it is not led here, for the reason `refusal`, an error code."""

    topic_id: bytes
    fetch: PartitionFetch
    partition: Partition | None
    refusal: int = error_codes.NOT_LEADER_OR_FOLLOWER


Answered = tuple[bytes, PartitionFetched]
"""A topic's id, and the result for one of its partitions."""


@dataclass(slots=True, eq=False)
class _Question:
    """An open question. `refused` is the answer if there are no records to return."""

    owner: OpenFetches
    asked: Asked
    told: tuple[int, int]
    refused: PartitionFetched | None = None

    @property
    def key(self) -> _Key:
        return self.asked.topic_id, self.asked.fetch.partition_index

    def on_append(self) -> None:
        self.owner.is_ready(self, is_urgent=True)

    def on_marks(self) -> None:
        self.owner.is_ready(self, is_urgent=False)


class OpenFetches:
    """The open questions of one connection of the follower `replica_id`; `close` when the connection ends.

    `clock` is that of the partitions led here.
    """

    def __init__(self, replica_id: int, clock: Clock) -> None:
        self._replica_id = replica_id
        self._contact = FollowerContact(clock)
        self._open: dict[_Key, _Question] = {}
        self._ready: dict[_Question, None] = {}
        # The last reported marks, and their partition; an error forgets them.
        self._told: dict[_Key, tuple[Partition, tuple[int, int]]] = {}
        self._news = asyncio.Event()
        self._is_hurried = False

    # Requests

    def serve(self, broker: Broker, request: Request) -> Body | Awaitable[Body]:
        """Answer a Fetch, at once if a question is urgent. Raises CodecError, CloseConnection."""
        fetch = parse_fetch(request.frame, request.header)
        if fetch.replica_id != self._replica_id:
            raise CloseConnection(f"broker {self._replica_id} sent Fetch with replica_id {fetch.replica_id}")
        if fetch.session_epoch != OPEN_EPOCH:
            raise CloseConnection(f"broker {self._replica_id} runs another release: upgrade all brokers together")
        broker.name_topics(fetch)
        asked = []
        for topic in fetch.topics:
            for start in topic.starts:
                wanted = partition_fetch(fetch, start)
                partition = broker.led(topic.name, wanted.partition_index)
                refusal = broker.refusal_in(fetch, topic, wanted.partition_index)
                asked.append(Asked(topic.wire, wanted, partition, refusal))
        withdrawn = [(topic_id, index) for topic_id, indexes in fetch.forgotten for index in indexes]
        self._is_hurried = False
        self._news.clear()
        self.take(asked, withdrawn)
        max_bytes = min(fetch.max_bytes, broker.config.fetch_max_bytes)
        if fetch.max_wait_ms <= 0:
            return _encode(self.answer(max_bytes))
        found, is_urgent = self._look(max_bytes)
        if is_urgent:
            return _encode(self._end_all(found))
        # Any question that becomes ready after this step ends the wait.
        deadline = asyncio.get_running_loop().time() + min(fetch.max_wait_ms, MAX_WAIT_MS) / 1000
        return self._answer_later(max_bytes, deadline)

    def hurry(self) -> None:
        """End a wait, because the next request has arrived."""
        self._is_hurried = True
        self._news.set()

    async def _answer_later(self, max_bytes: int, deadline: float) -> Body:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._news.wait()
            self._news.clear()
            found, is_urgent = self._look(max_bytes)
            if is_urgent or self._is_hurried or asyncio.get_running_loop().time() >= deadline:
                return _encode(self._end_all(found))

    # Questions

    def take(self, asked: Iterable[Asked], withdrawn: Iterable[_Key]) -> None:
        """End the withdrawn questions and add a request's; each replaces an open one for the same partition."""
        self._contact.heard()
        for key in withdrawn:
            self._end(self._open.get(key))
            self._told.pop(key, None)
        for each in asked:
            key = each.topic_id, each.fetch.partition_index
            self._end(self._open.get(key))
            known = self._told.get(key)
            told = known[1] if known is not None and known[0] is each.partition else _NOTHING
            question = self._open[key] = _Question(self, each, told)
            if each.partition is None:
                question.refused = PartitionFetched(each.fetch.partition_index, each.refusal)
            else:
                question.refused = each.partition.replica_asks(self._replica_id, each.fetch)
            self._ready[question] = None

    def answer(self, max_bytes: int) -> list[Answered]:
        """Answer all questions with news, urgent or not."""
        return self._end_all(self._look(max_bytes)[0])

    def close(self) -> None:
        """End every question because the connection is gone."""
        for question in list(self._open.values()):
            self._end(question)

    def is_ready(self, question: _Question, *, is_urgent: bool) -> None:
        """Mark an idle question as ready; its partition calls this."""
        self._ready[question] = None
        if is_urgent:
            self._stop_waiting(question)
            self._news.set()

    def _look(self, max_bytes: int) -> tuple[list[tuple[_Question, PartitionFetched]], bool]:
        """Return the answers, and whether one is urgent; the other ready questions become idle."""
        found: list[tuple[_Question, PartitionFetched]] = []
        left, is_urgent = max_bytes, False
        for question in list(self._ready):
            if len(found) >= MAX_PARTITIONS:
                break
            has_records = left < max_bytes
            if has_records and left <= 0 and question.refused is None:
                continue
            fetched = self._result(question, left)
            if has_records and len(fetched.records) > left:
                continue  # only the first batch of an answer may exceed the limits
            if fetched.records or fetched.error_code != error_codes.NONE or fetched.diverging_epoch is not None:
                is_urgent = True
            else:
                self._wait(question)
                if (fetched.high_watermark, fetched.log_start_offset) == question.told:
                    del self._ready[question]
                    continue
            left -= len(fetched.records)
            found.append((question, fetched))
        return found, is_urgent

    def _result(self, question: _Question, max_bytes: int) -> PartitionFetched:
        if question.refused is not None or question.asked.partition is None:
            return question.refused or PartitionFetched(question.key[1], question.asked.refusal)
        return question.asked.partition.read_as_replica(question.asked.fetch, max_bytes)

    def _wait(self, question: _Question) -> None:
        partition = question.asked.partition
        if partition is not None:
            partition.add_append_waiter(question.on_append)
            partition.add_waiter(question.on_marks)
            partition.replication.follower_waits(self._replica_id, self._contact)

    def _end_all(self, found: Sequence[tuple[_Question, PartitionFetched]]) -> list[Answered]:
        for question, fetched in found:
            self._end(question)
            partition = question.asked.partition
            if partition is None or fetched.error_code != error_codes.NONE:
                self._told.pop(question.key, None)
            else:
                partition.replication.follower_answered(self._replica_id, self._contact)
                self._told[question.key] = partition, (fetched.high_watermark, fetched.log_start_offset)
        return [(question.asked.topic_id, fetched) for question, fetched in found]

    def _end(self, question: _Question | None) -> None:
        if question is not None:
            del self._open[question.key]
            self._ready.pop(question, None)
            self._stop_waiting(question)

    def _stop_waiting(self, question: _Question) -> None:
        partition = question.asked.partition
        if partition is not None:
            partition.remove_waiter(question.on_append)
            partition.remove_waiter(question.on_marks)
            partition.replication.follower_waits_no_more(self._replica_id, self._contact)


def _encode(answered: Sequence[Answered]) -> Body:
    topics: dict[bytes, tuple[list[Buffer], int]] = {}
    for topic_id, fetched in answered:
        entries, count = topics.get(topic_id, ([], 0))
        entries.extend(result_entry(VERSION, fetched))
        topics[topic_id] = entries, count + 1
    head, tail = response_ends(VERSION, 0, [])
    named = [(topic_id, entries, count) for topic_id, (entries, count) in topics.items()]
    return [head, *encode_topics(named, flexible=True, by_id=True), tail]
