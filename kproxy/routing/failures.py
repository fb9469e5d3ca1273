"""Decide whether to retry or fail one partition of a request after a failed attempt.

kproxy.routing.retry has the rules for each error. This module adds the facts of the client connection: earlier
attempts, batches before it in its lane, deadlines, the client's end.

Rules
1. Nothing is sent again after its deadline, to a broker that hangs, or against the client's end or that of what it
   sends.
2. A batch behind a refused one is sent again behind it, and spends no attempt of its own.
3. If an attempt may have been appended, the batch is sent again only where brokers recognise it.
4. An out-of-order error behind a refused batch is not the batch's own outcome: producers stop at that code.
"""

from __future__ import annotations

from typing import NamedTuple

from kproxy.routing import retry
from kproxy.routing.actions import View
from kproxy.routing.client_end import ClientEnd
from kproxy.routing.identity import is_recognisable, lane_key
from kproxy.routing.lanes import Lanes, Pause
from kproxy.routing.merge import Exchange
from kproxy.routing.open_exchanges import OpenExchanges
from kproxy.routing.split import Entry
from kproxy.routing.topology import NO_OWNER
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.error_codes import NOT_LEADER_OR_FOLLOWER, OUT_OF_ORDER_SEQUENCE_NUMBER
from kproxy_codec.primitives import Buffer
from kproxy_codec.produce import base_offset_of


class Failure(NamedTuple):
    """A failed attempt of an entry, sent at the topology's version `routed_at`.

    `event` is an error code or a failure of kproxy.routing.retry. `result` is the broker's own entry, for codes that
    are passed on.
    """

    exchange: Exchange
    entry: Entry
    event: int
    routed_at: int
    result: Buffer | None = None


class AttemptOutcome(NamedTuple):
    """The next step: another attempt after `pause`, or `error_code` for the client.

    Without a pause the entry is sent again behind the one before it. `gives_up`: the batches that its client sent
    behind it must not come before it.
    """

    sends_again: bool
    pause: Pause | None
    error_code: int
    gives_up: bool


class Failures:
    """The decisions for one client connection."""

    __slots__ = ("_client", "_exchanges", "_lanes", "_topology", "_view")

    def __init__(self, view: View, lanes: Lanes, exchanges: OpenExchanges, client: ClientEnd) -> None:
        self._view = view
        self._topology = view.topology
        self._lanes = lanes
        self._exchanges = exchanges
        self._client = client

    def judge(self, failure: Failure, broker: int, now: float, jitter: float) -> AttemptOutcome:
        """Decide about an open entry that would go to `broker` now; NO_OWNER if to none. Counts the attempt."""
        exchange, entry, event, routed_at, result = failure
        key, sequence = lane_key(exchange, entry), exchange.sequence
        rows = self.rows(exchange, result)
        safe, is_ambiguous = False, retry.is_ambiguous(rows, event)
        if is_ambiguous:
            exchange.ambiguous.add(entry)
            safe = self._view.knows_batches_again and is_recognisable(exchange, entry)
        is_probing = self._lanes.is_probing(key, sequence)
        # If a refusal may follow an append, sending again is not safe just because it was behind another batch.
        behind = key in self._lanes and retry.is_held_back(event) and not is_probing and (safe or not is_ambiguous)
        attempts = exchange.attempts(entry)
        owner_version = self._topology.owner_version(*exchange.partition(entry))
        if not behind:
            attempts.add(routed_at, owner_version, now)
        decision = retry.decide(rows, event, exhausted=attempts.exhausted, resend_is_safe=safe)
        pause = None
        if not behind:
            soonest = now + attempts.soonest_s(jitter)
            has_moved = owner_version > routed_at and broker != NO_OWNER
            pause = Pause(soonest if has_moved else now + attempts.due_s(jitter), soonest, routed_at)
        sends_again = (
            (pause is None or (decision.retry and self._has_time(exchange, attempts, decision, pause, broker)))
            and not self._client.forbids(exchange, entry)
            and not self._client.forbids_again(exchange)
            and not self._lanes.is_given_up(key, sequence)
        )
        is_misled = event == OUT_OF_ORDER_SEQUENCE_NUMBER and (behind or self._exchanges.is_misled(exchange, entry))
        error_code = NOT_LEADER_OR_FOLLOWER if is_misled else decision.error_code
        return AttemptOutcome(sends_again, pause, error_code, gives_up=event in rows or retry.comes_again(event))

    def _has_time(
        self, exchange: Exchange, attempts: retry.Attempts, decision: retry.Decision, pause: Pause, broker: int
    ) -> bool:
        """Whether a retry may succeed before the deadline: it would wait behind a broker that hangs."""
        latest = min(exchange.deadline, attempts.first_failed_at + decision.wait_s)
        return pause.due < latest and not self._view.is_hung(self._topology.address(broker))

    def rows(self, exchange: Exchange, result: Buffer | None) -> dict[int, retry.Row]:
        """The rules for an exchange; `result` is the broker's answer to the entry, if there is one."""
        api_key = exchange.api.api_key
        base_offset = base_offset_of(result) if result is not None and api_key == PRODUCE else None
        return retry.rows_of(api_key, exchange.request.acks, self._view.conduct, base_offset)
