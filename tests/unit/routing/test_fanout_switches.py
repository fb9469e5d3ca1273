"""Each rule of the fan-out has a switch that breaks it, and a script that then fails.

The rules are the numbered invariants of kproxy.routing's modules. A script that passes with its rule broken would prove
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Any

import pytest

from kproxy.routing import fanout, in_flight, lanes, reads, refused, retry
from kproxy.routing.actions import Action, Actions, Failed, Fenced
from kproxy.routing.client_end import ClientEnd
from kproxy.routing.fanout import Fanout
from kproxy.routing.in_flight import BrokerConnection, InFlight, Piece
from kproxy.routing.lanes import Item, Lanes, LaneState
from kproxy.routing.merge import Exchange, Matched
from kproxy.routing.open_exchanges import OpenExchanges
from kproxy.routing.outcomes import Outcomes
from kproxy.routing.reads import Reads
from kproxy.routing.routes import Router, Routes
from kproxy.routing.split import Entry, Selection
from kproxy.routing.topology import NO_OWNER, Topology
from kproxy_codec.fetch import FetchRequest
from kproxy_codec.partitioned import PartitionedResponse
from kproxy_codec.primitives import Buffer
from tests.unit.routing import (
    test_fanout_answers,
    test_fanout_clients,
    test_fanout_ends,
    test_fanout_lanes,
    test_fanout_reads,
    test_fanout_retries,
    test_fanout_topology,
)

Patch = Callable[[pytest.MonkeyPatch], None]
Script = Callable[[], None]


def nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def says(answer: object) -> Callable[..., Any]:
    return lambda *_, **__: answer


def replaced(owner: object, name: str, other: object) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, other)


# Changes that do more than omit a call

_hold_back = Fanout._hold_back
_succeeded = Fanout._succeeded
_note = Fanout._note
_failed = Fanout._failed
_fences = Fanout._fences
_take_results = Fanout._take_results
_connection_to = InFlight.connection_to
_add = Actions.add
_conclude = OpenExchanges.conclude
_begin_read = Reads._begin


def held_and_sent(core: Fanout, exchange: Exchange, refused: Mapping[Entry, int]) -> set[Entry]:
    """Also send the batches that wait in a lane."""
    _hold_back(core, exchange, refused)
    return set()


def send_in_the_midst(core: Fanout, piece: Piece, entry: Entry) -> None:
    """Send the batches that a success releases before all lanes are changed."""
    _succeeded(core, piece, entry)
    core._send_released()


def follow_owners_alone(core: Fanout) -> None:
    """Treat an owner that left and returned like one that never left."""
    core.routes.forget_outdated(core._topology.moved_since(core.version))
    core.version = core._topology.version
    for piece in core._in_flight.ordered():
        for entry in piece.entries():
            if core._router.broker_for(piece.exchange, entry) != piece.connection.broker:
                core.lanes.block(piece.exchange.partition(entry), (piece.exchange.sequence,))


def begin_with_nothing(self: Reads, read: Exchange) -> None:
    """Drop what came between two reads."""
    self.found = ()
    _begin_read(self, read)


def note_twice(core: Fanout, piece: Piece, frame: memoryview, matched: Matched) -> None:
    _note(core, piece, frame, matched)
    _note(core, piece, frame, matched)


def fail_without_a_deadline(core: Fanout, exchange: Exchange, entry: Entry, *event: Any) -> None:
    """Allow a retry after its back-off, even past the deadline."""
    deadline, exchange.deadline = exchange.deadline, inf
    _failed(core, exchange, entry, *event)
    exchange.deadline = deadline


def prove_without_a_success(core: Fanout, piece: Piece, frame: memoryview, matched: Matched) -> None:
    """Prove a route by any answer."""
    for entry, *_ in matched:
        core.routes.prove(*piece.exchange.partition(entry), piece.connection.number, piece.routed_at)
    _take_results(core, piece, frame, matched)


def fences_of_the_first_time(core: Fanout, exchange: Exchange, selection: Selection) -> list[Fenced]:
    """Keep the fence of an entry's first attempt."""
    return [(partition, 7) for partition, _ in _fences(core, exchange, selection)]


def a_connection_for_each(self: InFlight, broker: int) -> BrokerConnection:
    self._by_broker.pop(broker, None)
    return _connection_to(self, broker)


def count_no_failure(self: Actions, action: Action) -> None:
    if not isinstance(action, Failed):
        _add(self, action)


def conclude_in_own_words(
    self: OpenExchanges, exchange: Exchange, entry: Entry, error_code: int, result: Buffer | None = None
) -> None:
    """Replace the broker's own entry."""
    _conclude(self, exchange, entry, error_code)


def take_again(self: Exchange, entry: Entry, result: Buffer) -> None:
    """Let a second result replace the first."""
    if self._results is None:
        self._results = [[None] * len(topic.partitions) for topic in self.request.topics]
    self._results[entry[0]][entry[1]] = result
    self.open_count -= 1


def throttle_of_the_last(self: Exchange, response: PartitionedResponse) -> None:
    self.throttle_time_ms = response.throttle_time_ms


def wait_for_time_alone(lane: Any) -> bool:
    """Let a lane's timer fire even if batches elsewhere are unanswered."""
    return bool(lane.waiting) and lane.state is LaneState.BLOCKED


def forget_quietly(self: Routes, topic: bytes, partition_index: int) -> None:
    del self._proven[topic][partition_index]


def prove_at_any_version(self: Routes, topic: bytes, partition_index: int, connection: int, routed_at: int) -> None:
    _prove(self, topic, partition_index, connection, 1 << 60)


_prove = Routes.prove


def append(items: list[Item], item: Item, **_: object) -> None:
    items.append(item)


def note_all(self: in_flight.RecentBatches, partition: tuple[bytes, int], routed_at: int, now: float) -> None:
    batches, _ = self._now.get(partition, (0, 0))
    self._now[partition] = (batches + 1, routed_at)


def new_nowhere(self: Routes, topic: Any, ordinals: Iterable[int], connection: int) -> list[int]:
    """Treat a route proven on one connection as proven on all."""
    proven = self._proven.get(topic.name, {})
    return [ordinal for ordinal in ordinals if topic.partitions[ordinal] not in proven]


# By rule: the patch that breaks it, and the script that then fails.
SWITCHES: dict[str, tuple[Patch, Script]] = {
    "fanout 1: an entry is in one place": (
        replaced(Fanout, "_hold_back", held_and_sent),
        test_fanout_lanes.test_new_route_sends_one_batch_before_the_rest,
    ),
    "fanout 2: nothing overtakes what is sent again": (
        replaced(Fanout, "_hold_back", says(set())),
        test_fanout_lanes.test_new_batch_does_not_overtake_resent_ones,
    ),
    "fanout 3: on a new route one batch goes first": (
        replaced(Fanout, "_probe_new_routes", nothing),
        test_fanout_lanes.test_new_route_sends_one_batch_before_the_rest,
    ),
    "fanout 4: what goes elsewhere waits": (
        replaced(Lanes, "block", nothing),
        test_fanout_lanes.test_later_batch_waits_for_answer_of_former_owner,
    ),
    "fanout 4: A, then B, then A again is elsewhere": (
        replaced(Fanout, "_follow", follow_owners_alone),
        test_fanout_lanes.test_batch_waits_for_one_under_earlier_ownership,
    ),
    "fanout 4: late news of an ownership is news": (
        replaced(Topology, "owner_version", Topology.owner_revision),
        test_fanout_topology.test_older_revision_blocks_requests_in_flight,
    ),
    "fanout 5: nothing is sent again past the deadline": (
        replaced(Fanout, "_failed", fail_without_a_deadline),
        partial(test_fanout_retries.test_retry_only_past_deadline_is_answered_at_once, 6),
    ),
    "fanout 5: nothing is sent past it to another owner": (
        replaced(Fanout, "_failed", fail_without_a_deadline),
        test_fanout_retries.test_owner_move_past_deadline_resends_nothing,
    ),
    "fanout 5: nothing is sent that waited past the deadline": (
        replaced(Exchange, "is_late", says(False)),
        test_fanout_retries.test_batch_released_after_deadline_is_answered_unsent,
    ),
    "fanout 5: what waits behind is given up": (
        replaced(Lanes, "give_up", says([])),
        test_fanout_ends.test_batch_behind_a_piece_taken_back_is_failed,
    ),
    "fanout 5: what is taken back is settled": (
        replaced(Outcomes, "settle_pieces", nothing),
        test_fanout_ends.test_piece_waiting_for_dial_is_taken_back,
    ),
    "fanout 5: what is not written is taken back": (
        replaced(InFlight, "withdraw", says([])),
        test_fanout_ends.test_piece_waiting_for_dial_is_taken_back,
    ),
    "fanout 5: what a broker may have seen keeps its lane": (
        replaced(InFlight, "of", says(())),
        test_fanout_ends.test_silent_connection_ends_after_a_deadline,
    ),
    "fanout 5: what came behind it on the plain path is given up with it": (
        replaced(Fanout, "is_due", says(False)),
        test_fanout_topology.test_plain_request_behind_expired_batch_is_given_up,
    ),
    "fanout 6: nothing more is sent for a client that is gone": (
        replaced(ClientEnd, "forbids", says(False)),
        test_fanout_clients.test_batch_refused_afterwards_is_not_resent,
    ),
    "fanout 6: what a broker has got is held": (
        replaced(ClientEnd, "hold", nothing),
        test_fanout_clients.test_written_batch_of_writer_group_is_held,
    ),
    "fanout 6: what is lost is said to be lost": (
        replaced(fanout, "_MAY_STILL_BE_APPENDED", ()),
        test_fanout_clients.test_lost_held_batch_is_reported_before_release,
    ),
    "fanout 7: all lanes first": (
        replaced(Fanout, "_succeeded", send_in_the_midst),
        test_fanout_lanes.test_batches_released_together_share_a_piece_per_broker,
    ),
    "fanout 8: a request is answered once": (
        replaced(OpenExchanges, "__contains__", says(True)),
        test_fanout_clients.test_acknowledgement_of_departed_client_is_not_noted,
    ),
    "fanout 8: an acknowledgement is noted once": (
        replaced(Fanout, "_note", note_twice),
        test_fanout_answers.test_acknowledgement_is_noted_before_its_answer,
    ),
    "fanout 8: an acknowledgement is noted": (
        replaced(Fanout, "_note", nothing),
        test_fanout_lanes.test_proven_route_pipelines_batches,
    ),
    "fanout 9: an error is counted": (
        replaced(Actions, "add", count_no_failure),
        test_fanout_reads.test_error_ends_a_read,
    ),
    "fanout 9: what is not delivered is said last": (
        replaced(Actions, "add_last", Actions.add),
        partial(test_fanout_ends.test_permanently_refused_confirmed_acks_0_is_lost, 87),
    ),
    "fanout 11: a fence is that of the moment of sending": (
        replaced(Fanout, "_fences", fences_of_the_first_time),
        test_fanout_clients.test_retry_carries_the_current_fence,
    ),
    "retry: attempts before the re-read ends do not count": (
        replaced(retry.Attempts, "send_blindly", nothing),
        test_fanout_retries.test_attempts_during_a_reread_do_not_count,
    ),
    "retry: the back-off grows with attempts that do not count": (
        replaced(retry, "BACKOFF_S", (0.02, 0.02, 0.25, 0.5)),
        test_fanout_retries.test_attempts_during_a_reread_do_not_count,
    ),
    "reads 1: an answer is for what was asked": (
        replaced(FetchRequest, "entry", says(b"")),
        partial(test_fanout_reads.test_answer_to_another_question_is_not_given, "t-0@6 t-1@8", {}, "before"),
    ),
    "reads 1: under the same limits": (
        replaced(FetchRequest, "asks_alike", says(True)),
        partial(
            test_fanout_reads.test_answer_to_another_question_is_not_given, "t-0@6 t-1@7", {"min_bytes": 2}, "after"
        ),
    ),
    "reads 1: from the present owner": (
        replaced(Topology, "owner_version", says(0)),
        partial(test_fanout_reads.test_moved_partition_is_asked_at_its_new_owner, "before"),
    ),
    "reads 2: what comes between two reads is kept": (
        replaced(Reads, "_begin", begin_with_nothing),
        test_fanout_reads.test_answer_between_reads_is_kept_for_the_next,
    ),
    "reads 2: for a second": (
        replaced(Reads, "forget", nothing),
        test_fanout_reads.test_kept_answer_is_dropped_after_a_second,
    ),
    "reads 3: what is covered is not asked": (
        replaced(Reads, "_aims", says(())),
        test_fanout_reads.test_waiting_broker_serves_the_next_read,
    ),
    "reads 4: offsets are known": (
        replaced(reads, "offsets_of", says(b"")),
        test_fanout_reads.test_partition_without_answer_has_its_last_offsets,
    ),
    "reads: a late broker is left out": (
        replaced(Reads, "_is_late", says(False)),
        test_fanout_reads.test_reads_do_not_wait_for_late_broker,
    ),
    "refused 1: what comes too early is refused": (
        replaced(refused.Refused, "arrived", says(False)),
        partial(test_fanout_retries.test_batch_behind_refused_one_is_not_sent, 2),
    ),
    "refused 1: only until one comes again": (
        replaced(refused.Refused, "arrived", says(True)),
        partial(test_fanout_retries.test_batch_behind_refused_one_is_not_sent, 3),
    ),
    "in_flight 1: one connection to a broker": (
        replaced(InFlight, "connection_to", a_connection_for_each),
        test_fanout_ends.test_broker_has_one_open_connection,
    ),
    "in_flight 2: what is under way is known": (
        replaced(InFlight, "of", says(())),
        test_fanout_lanes.test_appended_later_batch_passes_on_first_ones_code,
    ),
    "in_flight 3: a bound of what is in doubt": (
        replaced(in_flight.RecentBatches, "note", note_all),
        test_fanout_ends.test_uncertain_partitions_by_name_end_at_4096,
    ),
    "lanes 2: while a lane exists nothing is sent but the one that probes": (
        replaced(Lanes, "is_probing", says(True)),
        test_fanout_lanes.test_success_under_earlier_ownership_proves_no_route,
    ),
    "lanes 1: items wait in the order of requests": (
        replaced(lanes, "insort", append),
        test_fanout_lanes.test_refusal_of_former_owner_precedes_waiting_batches,
    ),
    "lanes 3: a route is proven by a success": (
        replaced(Fanout, "_take_results", prove_without_a_success),
        test_fanout_lanes.test_only_first_batchs_success_proves_a_route,
    ),
    "lanes 3: a route is proven under the ownership that is": (
        replaced(Routes, "prove", prove_at_any_version),
        test_fanout_lanes.test_success_under_earlier_ownership_proves_no_route,
    ),
    "lanes 4: what came before its client could know is given up": (
        replaced(Lanes, "is_given_up", says(False)),
        test_fanout_lanes.test_only_batches_sent_unaware_are_given_up,
    ),
    "lanes 4: an error that is handed on gives up what came before its client could know": (
        replaced(retry, "comes_again", says(False)),
        test_fanout_retries.test_batch_behind_clients_retry_is_not_resent,
    ),
    "lanes 5: a lane's timer waits for what is unanswered elsewhere": (
        replaced(lanes, "_waits_for_time", wait_for_time_alone),
        test_fanout_lanes.test_lane_waits_for_overdue_unanswered_batches,
    ),
    "lanes 5: a move ends a back-off": (
        replaced(Lanes, "hasten", nothing),
        test_fanout_topology.test_first_back_off_ends_at_a_new_owner,
    ),
    "lanes: two names have one lane": (
        replaced(Lanes, "rename", says([])),
        test_fanout_topology.test_topic_named_by_id_and_name_keeps_order,
    ),
    "routes 1: proven on one connection": (
        replaced(Routes, "new_among", new_nowhere),
        test_fanout_ends.test_route_of_an_ending_connection_is_new,
    ),
    "routes 2: what is proven is forgotten with the ownership": (
        replaced(Routes, "forget_outdated", nothing),
        partial(test_fanout_lanes.test_route_is_new_after_ownership_returns, (2, 1)),
    ),
    "routes 2: and with its broker's refusal": (
        replaced(Routes, "refuted", nothing),
        test_fanout_lanes.test_broker_denying_ownership_gets_one_batch_first,
    ),
    "split: what nobody owns goes on to its taker": (
        replaced(Router, "taken_by", says(NO_OWNER)),
        test_fanout_lanes.test_unowned_partition_stays_with_accepting_broker,
    ),
    "routes 2: and with the connection": (
        replaced(Routes, "forget_connection", nothing),
        test_fanout_lanes.test_route_is_new_again_on_another_connection,
    ),
    "routes 3: a forgotten route begins a generation": (
        replaced(Routes, "_forget", forget_quietly),
        partial(test_fanout_lanes.test_forgotten_route_begins_a_generation, "moves"),
    ),
    "merge 1: of two results the first counts": (
        replaced(Exchange, "take", take_again),
        test_fanout_ends.test_first_of_two_results_for_partition_counts,
    ),
    "merge 1: a late result does not count": (
        replaced(Exchange, "take", take_again),
        partial(test_fanout_ends.test_late_answer_changes_nothing_for_the_client, "t-0"),
    ),
    "merge 2: answers are in the order of requests": (
        replaced(fanout, "answers_in_order", says(True)),
        test_fanout_answers.test_whole_answer_is_put_into_request_order,
    ),
    "merge 3: the longest throttle time": (
        replaced(Exchange, "note", throttle_of_the_last),
        test_fanout_answers.test_proxys_throttle_time_is_the_brokers_longest,
    ),
    "merge 4: a result's bytes are the broker's own": (
        replaced(OpenExchanges, "conclude", conclude_in_own_words),
        partial(test_fanout_retries.test_passed_on_entry_is_the_brokers_own, 87),
    ),
}


def is_red(script: Script) -> bool:
    try:
        script()
    except (AssertionError, ValueError):
        # ValueError: a state machine was asked for an invalid transition.
        return True
    return False


@pytest.mark.parametrize("rule", SWITCHES)
def test_script_fails_when_its_rule_is_broken(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, script = SWITCHES[rule]
    assert not is_red(script)
    patch(monkeypatch)
    assert is_red(script), "nothing shows that the rule is broken"
