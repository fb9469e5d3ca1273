"""For each rule of the fan-out a switch that breaks it, and a script that then fails.

The rules are the numbered invariants of kproxy.routing's modules. A script that stayed green with its rule broken would
show nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Any, NamedTuple

import pytest

from kproxy.routing import fanout, in_flight, lanes, refused, retry
from kproxy.routing.actions import Action, Actions, Failed, Fenced
from kproxy.routing.client_end import ClientEnd
from kproxy.routing.fanout import Fanout
from kproxy.routing.identity import LaneKey
from kproxy.routing.in_flight import BrokerConnection, InFlight, Piece
from kproxy.routing.lanes import Item, Lanes, LaneState
from kproxy.routing.merge import Exchange, Matched
from kproxy.routing.open_exchanges import OpenExchanges
from kproxy.routing.routes import Routes
from kproxy.routing.split import Entry, Selection
from kproxy.routing.topology import NO_OWNER, Topology
from kproxy_codec.partitioned import PartitionedResponse
from kproxy_codec.primitives import Buffer
from tests.unit.routing import (
    test_fanout_answers,
    test_fanout_clients,
    test_fanout_ends,
    test_fanout_lanes,
    test_fanout_retries,
    test_fanout_topology,
)

Patch = Callable[[pytest.MonkeyPatch], None]
Script = Callable[[], None]


def nothing(*_: object, **__: object) -> None:
    """Not done at all."""


def says(answer: object) -> Callable[..., Any]:
    return lambda *_, **__: answer


def replaced(owner: object, name: str, other: object) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, other)


# What is more than a call left out

_hold_back = Fanout._hold_back
_settle_lane = Fanout._settle_lane
_note = Fanout._note
_failed = Fanout._failed
_fences = Fanout._fences
_take_results = Fanout._take_results
_connection_to = InFlight.connection_to
_add = Actions.add
_conclude = OpenExchanges.conclude


def held_and_sent(core: Fanout, exchange: Exchange, refused: Mapping[Entry, int]) -> set[Entry]:
    """What waits in a lane is sent as well."""
    _hold_back(core, exchange, refused)
    return set()


def send_in_the_midst(core: Fanout, key: LaneKey, sequence: int, **options: bool) -> None:
    """What an outcome releases is sent at once."""
    _settle_lane(core, key, sequence, appended=options["appended"], given_up=options.get("given_up", False))
    core._send_released()


def follow_owners_alone(core: Fanout) -> None:
    """An owner that has left and come back is taken for one that never left."""
    core.routes.forget_outdated(core._topology.moved_since(core.version))
    core.version = core._topology.version
    for piece in core._in_flight.ordered():
        for entry in piece.entries():
            if core._route(piece.exchange, entry) != piece.connection.broker:
                core.lanes.block(piece.exchange.partition(entry), (piece.exchange.sequence,))


def note_twice(core: Fanout, piece: Piece, frame: memoryview, matched: Matched) -> None:
    _note(core, piece, frame, matched)
    _note(core, piece, frame, matched)


def fail_without_a_deadline(core: Fanout, exchange: Exchange, entry: Entry, *event: Any) -> None:
    """A retry may come whenever its back-off is over."""
    deadline, exchange.deadline = exchange.deadline, inf
    _failed(core, exchange, entry, *event)
    exchange.deadline = deadline


def prove_without_a_success(core: Fanout, piece: Piece, frame: memoryview, matched: Matched) -> None:
    """Whatever the answer says."""
    for entry, *_ in matched:
        core.routes.prove(*piece.exchange.partition(entry), piece.connection.number, piece.routed_at)
    _take_results(core, piece, frame, matched)


def fences_of_the_first_time(core: Fanout, exchange: Exchange, selection: Selection) -> list[Fenced]:
    """An entry keeps the fence with which it was sent first."""
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
    """The broker's own entry is not handed on."""
    _conclude(self, exchange, entry, error_code)


def take_again(self: Exchange, entry: Entry, result: Buffer) -> None:
    """A second result takes the place of the first."""
    if self._results is None:
        self._results = [[None] * len(topic.partitions) for topic in self.request.topics]
    self._results[entry[0]][entry[1]] = result
    self.open_count -= 1


def throttle_of_the_last(self: Exchange, response: PartitionedResponse) -> None:
    self.throttle_time_ms = response.throttle_time_ms


def wait_for_time_alone(lane: Any) -> bool:
    """A lane's timer rings whatever is unanswered elsewhere."""
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
    """A route that is proven on one connection is taken for proven on all."""
    proven = self._proven.get(topic.name, {})
    return [ordinal for ordinal in ordinals if topic.partitions[ordinal] not in proven]


class Switch(NamedTuple):
    """A rule is broken by `patch`, and `script` shows it."""

    patch: Patch
    script: Script


def with_patches(script: Callable[[pytest.MonkeyPatch], None]) -> Script:
    """A script that patches something itself."""

    def run() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            script(monkeypatch)

    return run


SWITCHES: dict[str, Switch] = {
    "fanout 1: an entry is in one place": Switch(
        replaced(Fanout, "_hold_back", held_and_sent),
        test_fanout_lanes.test_on_a_new_route_one_batch_goes_first_and_the_rest_follows_its_success_in_order,
    ),
    "fanout 2: nothing overtakes what is sent again": Switch(
        replaced(Fanout, "_hold_back", says(set())),
        test_fanout_lanes.test_after_a_lost_connection_nothing_new_overtakes_what_is_sent_again,
    ),
    "fanout 3: on a new route one batch goes first": Switch(
        replaced(Fanout, "_probe_new_routes", nothing),
        test_fanout_lanes.test_on_a_new_route_one_batch_goes_first_and_the_rest_follows_its_success_in_order,
    ),
    "fanout 4: what goes elsewhere waits": Switch(
        replaced(Lanes, "block", nothing),
        test_fanout_lanes.test_a_later_batch_waits_while_an_earlier_one_is_unanswered_at_the_former_owner,
    ),
    "fanout 4: A, then B, then A again is elsewhere": Switch(
        replaced(Fanout, "_follow", follow_owners_alone),
        test_fanout_lanes.test_a_batch_waits_for_one_that_its_broker_was_sent_under_an_earlier_ownership,
    ),
    "fanout 4: late news of an ownership is news": Switch(
        replaced(Topology, "owner_version", Topology.owner_revision),
        test_fanout_topology.test_news_at_a_revision_below_the_highest_seen_blocks_what_is_under_way,
    ),
    "fanout 5: nothing is sent again past the deadline": Switch(
        replaced(Fanout, "_failed", fail_without_a_deadline),
        partial(test_fanout_retries.test_what_could_go_again_only_past_the_deadline_is_answered_at_once, 6),
    ),
    "fanout 5: nothing is sent past it to another owner": Switch(
        replaced(Fanout, "_failed", fail_without_a_deadline),
        test_fanout_retries.test_a_move_to_another_owner_sends_nothing_again_past_the_deadline,
    ),
    "fanout 5: nothing is sent that waited past the deadline": Switch(
        replaced(Exchange, "is_late", says(False)),
        test_fanout_retries.test_what_is_released_after_its_deadline_is_answered_and_not_sent,
    ),
    "fanout 5: what waits behind is given up": Switch(
        replaced(Lanes, "give_up", says([])),
        test_fanout_ends.test_what_waits_behind_a_piece_that_is_taken_back_is_given_up_with_it,
    ),
    "fanout 5: what is taken back is settled": Switch(
        replaced(Fanout, "_settle_pieces", nothing),
        test_fanout_ends.test_a_piece_that_waits_for_its_dial_is_taken_back_and_its_lane_goes_on,
    ),
    "fanout 5: what is not written is taken back": Switch(
        replaced(InFlight, "withdraw", says([])),
        test_fanout_ends.test_a_piece_that_waits_for_its_dial_is_taken_back_and_its_lane_goes_on,
    ),
    "fanout 5: what a broker may have seen keeps its lane": Switch(
        replaced(InFlight, "of", says(())),
        test_fanout_ends.test_a_connection_is_ended_where_nothing_has_come_for_long_after_a_deadline,
    ),
    "fanout 5: what came behind it on the plain path is given up with it": Switch(
        replaced(Fanout, "is_due", says(False)),
        test_fanout_topology.test_the_plain_path_behind_a_batch_whose_time_is_over_is_given_up_with_it,
    ),
    "fanout 6: nothing more is sent for a client that is gone": Switch(
        replaced(ClientEnd, "forbids", says(False)),
        test_fanout_clients.test_what_is_refused_afterwards_is_not_sent_again,
    ),
    "fanout 6: what a broker has got is held": Switch(
        replaced(ClientEnd, "hold", nothing),
        test_fanout_clients.test_what_is_written_for_a_topic_with_a_writer_group_is_held_until_it_is_answered,
    ),
    "fanout 6: what is lost is said to be lost": Switch(
        replaced(fanout, "_MAY_STILL_BE_APPENDED", ()),
        test_fanout_clients.test_what_is_lost_while_it_is_held_is_said_to_be_lost_before_it_is_let_go,
    ),
    "fanout 7: all lanes first": Switch(
        replaced(Fanout, "_settle_lane", send_in_the_midst),
        test_fanout_lanes.test_what_is_released_together_goes_in_one_piece_for_each_broker,
    ),
    "fanout 8: a request is answered once": Switch(
        replaced(OpenExchanges, "__contains__", says(True)),
        test_fanout_clients.test_acknowledgements_are_noted_for_nobody_who_is_gone,
    ),
    "fanout 8: an acknowledgement is noted once": Switch(
        replaced(Fanout, "_note", note_twice),
        test_fanout_answers.test_an_acknowledgement_is_noted_with_its_broker_before_its_answer,
    ),
    "fanout 8: an acknowledgement is noted": Switch(
        replaced(Fanout, "_note", nothing),
        test_fanout_lanes.test_on_a_proven_route_batches_are_pipelined,
    ),
    "fanout 9: an error is counted": Switch(
        replaced(Actions, "add", count_no_failure),
        test_fanout_answers.test_an_error_is_not_waited_upon,
    ),
    "fanout 9: what is not delivered is said last": Switch(
        replaced(Actions, "add_last", Actions.add),
        partial(
            test_fanout_ends.test_confirmed_acks_0_refused_for_good_is_lost_and_the_next_is_delivered,
            87,
        ),
    ),
    "fanout 10: a fence is that of the moment of sending": Switch(
        replaced(Fanout, "_fences", fences_of_the_first_time),
        test_fanout_clients.test_a_retry_goes_with_the_fence_in_force_when_it_is_sent,
    ),
    "retry: attempts before the re-read ends do not count": Switch(
        replaced(retry.Attempts, "send_blindly", nothing),
        test_fanout_retries.test_attempts_during_a_reread_do_not_count,
    ),
    "retry: the back-off grows with attempts that do not count": Switch(
        replaced(retry, "BACKOFF_S", (0.02, 0.02, 0.25, 0.5)),
        test_fanout_retries.test_attempts_during_a_reread_do_not_count,
    ),
    "open_exchanges 3: a read looks again": Switch(
        replaced(OpenExchanges, "_looks_again", says(False)),
        test_fanout_answers.test_a_read_over_brokers_that_found_nothing_is_asked_again_after_a_pause,
    ),
    "open_exchanges 4: what is misled is not told so": Switch(
        replaced(OpenExchanges, "is_misled", says(False)),
        partial(test_fanout_retries.test_out_of_order_behind_a_batch_that_its_client_sends_again_is_not_handed_on, 56),
    ),
    "refused 1: only what has not come again misleads": Switch(
        replaced(refused.Refused, "arrived", nothing),
        test_fanout_retries.test_the_plain_path_tells_of_what_comes_again,
    ),
    "in_flight 1: one connection to a broker": Switch(
        replaced(InFlight, "connection_to", a_connection_for_each),
        test_fanout_ends.test_a_broker_has_one_connection_that_is_not_closed,
    ),
    "in_flight 2: what is under way is known": Switch(
        replaced(InFlight, "of", says(())),
        test_fanout_lanes.test_when_a_later_batch_was_appended_after_all_the_first_ones_own_code_is_handed_on,
    ),
    "in_flight 3: a bound of what is in doubt": Switch(
        replaced(in_flight.RecentBatches, "note", note_all),
        with_patches(test_fanout_ends.test_no_more_partitions_than_a_bound_are_in_doubt_by_name),
    ),
    "lanes 2: while a lane exists nothing is sent but the one that probes": Switch(
        replaced(Lanes, "is_probing", says(True)),
        test_fanout_lanes.test_a_success_under_an_earlier_ownership_proves_no_route,
    ),
    "lanes 1: items wait in the order of requests": Switch(
        replaced(lanes, "insort", append),
        test_fanout_lanes.test_what_the_former_owner_refuses_goes_before_what_waits_for_the_new_one,
    ),
    "lanes 3: a route is proven by a success": Switch(
        replaced(Fanout, "_take_results", prove_without_a_success),
        test_fanout_lanes.test_a_route_is_proven_by_a_success_of_what_went_first_and_by_nothing_else,
    ),
    "lanes 3: a route is proven under the ownership that is": Switch(
        replaced(Routes, "prove", prove_at_any_version),
        test_fanout_lanes.test_a_success_under_an_earlier_ownership_proves_no_route,
    ),
    "lanes 4: what came before its client could know is given up": Switch(
        replaced(Lanes, "is_given_up", says(False)),
        test_fanout_lanes.test_what_came_before_the_client_could_know_is_given_up_and_what_comes_later_is_not,
    ),
    "lanes 4: an error that is handed on gives up what came before its client could know": Switch(
        replaced(retry, "comes_again", says(False)),
        test_fanout_retries.test_behind_a_batch_that_its_client_sends_again_nothing_is_sent_again,
    ),
    "lanes 5: a lane's timer waits for what is unanswered elsewhere": Switch(
        replaced(lanes, "_waits_for_time", wait_for_time_alone),
        test_fanout_lanes.test_a_lane_waits_for_all_that_is_unanswered_however_long_its_time_is_over,
    ),
    "lanes 5: a move ends a back-off": Switch(
        replaced(Lanes, "hasten", nothing),
        test_fanout_topology.test_a_first_back_off_ends_at_once_when_the_topology_names_another_owner,
    ),
    "lanes: two names have one lane": Switch(
        replaced(Lanes, "rename", says([])),
        test_fanout_topology.test_a_topic_named_by_id_and_by_name_before_its_id_is_known_keeps_one_order,
    ),
    "routes 1: proven on one connection": Switch(
        replaced(Routes, "new_among", new_nowhere),
        test_fanout_ends.test_a_route_of_a_connection_that_is_being_ended_is_new,
    ),
    "routes 2: what is proven is forgotten with the ownership": Switch(
        replaced(Routes, "forget_outdated", nothing),
        partial(test_fanout_lanes.test_a_route_is_new_again_when_ownership_has_moved_and_come_back, (2, 1)),
    ),
    "routes 2: and with its broker's refusal": Switch(
        replaced(Routes, "refuted", nothing),
        test_fanout_lanes.test_a_broker_that_says_it_is_no_owner_gets_one_batch_first_afterwards,
    ),
    "split: what nobody owns goes on to its taker": Switch(
        replaced(Fanout, "_taken_by", says(NO_OWNER)),
        test_fanout_lanes.test_what_nobody_owns_goes_on_to_the_broker_that_has_taken_it,
    ),
    "routes 2: and with the connection": Switch(
        replaced(Routes, "forget_connection", nothing),
        test_fanout_lanes.test_a_route_is_new_again_on_another_connection,
    ),
    "routes 3: plans are told to be wrong": Switch(
        replaced(Routes, "_forget", forget_quietly),
        partial(test_fanout_lanes.test_plans_are_told_to_be_wrong_when_a_route_is_forgotten, "moves"),
    ),
    "merge 1: of two results the first counts": Switch(
        replaced(Exchange, "take", take_again),
        test_fanout_ends.test_of_two_results_for_one_partition_the_first_counts,
    ),
    "merge 1: a late result does not count": Switch(
        replaced(Exchange, "take", take_again),
        partial(test_fanout_ends.test_a_late_answer_changes_nothing_for_the_client, "t-0"),
    ),
    "merge 2: answers are in the order of requests": Switch(
        replaced(fanout, "answers_in_order", says(True)),
        test_fanout_answers.test_a_whole_answer_in_another_order_is_brought_in_order,
    ),
    "merge 3: the longest throttle time": Switch(
        replaced(Exchange, "note", throttle_of_the_last),
        test_fanout_answers.test_the_proxys_throttle_time_is_the_brokers_longest,
    ),
    "merge 4: a result's bytes are the broker's own": Switch(
        replaced(OpenExchanges, "conclude", conclude_in_own_words),
        partial(test_fanout_retries.test_what_is_handed_on_is_the_brokers_own_entry, 87),
    ),
}


def is_red(script: Script) -> bool:
    try:
        script()
    except (AssertionError, ValueError):
        # ValueError: a state machine has been asked for a step that it does not have.
        return True
    return False


@pytest.mark.parametrize("rule", SWITCHES)
def test_a_script_goes_red_where_its_rule_is_broken(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, script = SWITCHES[rule]
    assert not is_red(script)
    patch(monkeypatch)
    assert is_red(script), "nothing shows that the rule is broken"
