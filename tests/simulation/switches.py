"""Rules of the produce path switched off; the simulated worlds must notice each.

The rules are the numbered invariants of `kproxy.routing` and of the code that carries out its decisions; a switch names
the rule that it breaks. A switch patches only these modules, in ways that work whatever other modules have imported:
methods of classes, rows of tables, names that functions read from their modules, and the code of functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from enum import Enum
from types import FunctionType
from typing import Any, Final, NamedTuple, cast

import pytest

from kproxy.claims.inflight_writes import Hold, InflightWrites
from kproxy.proxy.claims import ClientClaims, FenceBinder, refused_writes
from kproxy.proxy.fanout import _CARRY_OUT
from kproxy.routing import lanes, merge, retry
from kproxy.routing.actions import NoteLost
from kproxy.routing.client_end import ClientEnd
from kproxy.routing.fanout import Fanout
from kproxy.routing.lanes import Lanes
from kproxy.routing.merge import Exchange
from kproxy.routing.refused import Refused
from kproxy.routing.retry import CONNECTION_LOST, UNREADABLE, RetryLimit, RetryRule
from kproxy.routing.routes import Routes
from kproxy_codec import error_codes as codes
from tests.simulation.setting import draw
from tests.simulation.world import Outcome, run_world

Patch = pytest.MonkeyPatch


class Worlds(Enum):
    """How many worlds are searched: many times the number needed."""

    FEW = 1_000
    # Slow ones, for `make test-all`: a script in test_fanout_switches shows the same at once.
    SOME = 1_001
    MANY = 20_000
    # No known effect is visible to clients or brokers; the table has the reason.
    NONE = 0


class Switch(NamedTuple):
    """`off` switches the rule `rule` off.

    `forgets`: only brokers that forget show it; `claims`: only claimants do; `slow_rereads`: only slow re-reads do.
    """

    name: str
    rule: str
    off: Callable[[Patch], None]
    takes: Worlds = Worlds.FEW
    forgets: bool = False
    claims: bool = False
    slow_rereads: bool = False


def _method(kind: type, name: str, new: Callable[..., object]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(kind, name, new)


def _code(function: Callable[..., object], new: Callable[..., object]) -> Callable[[Patch], None]:
    """Modules that have imported the function use the new one."""
    return lambda patch: patch.setattr(cast(FunctionType, function), "__code__", cast(FunctionType, new).__code__)


def _in_module(module: object, name: str, new: object) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(module, name, new)


_TABLES: Final = (retry.PRODUCE, retry.PRODUCE_UNCLEAR, retry.PRODUCE_REFUSED)


def _rows(
    events: Iterable[int], row: RetryRule, tables: Iterable[dict[int, RetryRule]] = _TABLES
) -> Callable[[Patch], None]:
    def off(patch: Patch) -> None:
        for table in tables:
            for event in events:
                patch.setitem(table, event, row)

    return off


# Replacements of methods

_settled, _refused, _prove, _note = Lanes.settled, Lanes.refused, Routes.prove, Refused.note
_have_lapsed = ClientClaims.have_lapsed


def _settled_always_releases(self: Lanes, key: Any, sequence: int, *, appended: bool, given_up: bool) -> Any:
    return _settled(self, key, sequence, appended=appended, given_up=False)


def _settled_knows_no_overtaking(self: Lanes, key: Any, sequence: int, *, appended: bool, given_up: bool) -> Any:
    return _settled(self, key, sequence, appended=False, given_up=given_up)


def _refused_waits_for_nobody(self: Lanes, key: Any, item: Any, pause: Any, outstanding: Any) -> None:
    _refused(self, key, item, pause, ())


def _prove_at_any_version(self: Any, topic: bytes, partition_index: int, connection: Any, routed_at: int) -> None:
    _prove(self, topic, partition_index, connection, 1 << 62)


def _take_twice(self: Exchange, entry: Any, result: Any) -> None:
    if self._results is None:
        self._results = [[None] * len(topic.partitions) for topic in self.request.topics]
    self._results[entry[0]][entry[1]] = result
    self.open_count -= 1


def _note_the_last_alone(self: Refused, key: Any, place: Any) -> None:
    self.lanes.pop(key, None)
    _note(self, key, place)


def _have_lapsed_at_a_dial(self: ClientClaims) -> bool:
    return sys._getframe(1).f_code.co_name == "before_open" and _have_lapsed(self)


def _have_lapsed_at_a_write(self: ClientClaims) -> bool:
    return sys._getframe(1).f_code.co_name != "before_open" and _have_lapsed(self)


def _hold_in_vain(self: InflightWrites, topic: str, partition_index: int) -> Hold:
    return Hold((topic, partition_index), 0.0)


def _yes(*_: object, **__: object) -> bool:
    return True


def _no(*_: object, **__: object) -> bool:
    return False


def _no_codes(*_: object, **__: object) -> dict[Any, int]:
    return {}


def _no_list(*_: object, **__: object) -> list[int]:
    return []


def _nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def _late(timeout_ms: int, cap_ms: int) -> float:
    return 30.0


SWITCHES: Final = (
    # kproxy.routing.lanes
    Switch(
        "a lane goes on although something is outstanding elsewhere",
        "lanes 2: while a lane exists, nothing of its partition is sent but the one item that probes",
        _in_module(lanes, "_waits_for_time", lambda lane: bool(lane.waiting) and lane.probing is None),
        Worlds.SOME,
    ),
    Switch(
        "a partition that has moved is not blocked by what is unanswered at its earlier owner",
        "lanes, blocked: N is unresolved on an earlier route and N+1 is to go elsewhere",
        _method(Lanes, "block", _nothing),
        Worlds.SOME,
    ),
    Switch(
        "what is under way behind a refused batch is not waited for",
        "lanes, refused: later ones already under way behind it",
        _method(Lanes, "refused", _refused_waits_for_nobody),
        Worlds.MANY,
    ),
    Switch(
        "a lane's items wait in any order",
        "lanes 1: items wait in the order of their requests",
        _in_module(lanes, "_sequence", lambda item: -item.exchange.sequence),
    ),
    Switch(
        "a new route is not probed",
        "lanes 3: a new route is proven by one success before anything is pipelined on it",
        _method(Lanes, "probe", _nothing),
        Worlds.SOME,
        forgets=True,
    ),
    Switch(
        "what waits behind a batch that was given up goes on",
        "lanes, probing -> (gone): its failure gives all of it up",
        _method(Lanes, "settled", _settled_always_releases),
    ),
    Switch(
        "a batch is sent again although a later one was appended",
        "lanes, blocked -> (gone): a later batch appended after all",
        _method(Lanes, "settled", _settled_knows_no_overtaking),
    ),
    Switch(
        "a lane does not hear of what is answered at its deadline",
        "lanes 4: what the client sent before it could know that a batch was given up is not sent again after it",
        _method(Lanes, "give_up", lambda *_: []),
        Worlds.MANY,
        forgets=True,
    ),
    Switch(
        "what is behind a batch that was given up is sent again",
        "lanes 4",
        _method(Lanes, "is_given_up", _no),
        Worlds.MANY,
        forgets=True,
    ),
    Switch(
        "what waits in lanes outlives its client",
        "fanout: dropped when its client is gone",
        # Nothing of it is sent: a caller that takes an item out of a lane first checks whether its request is still
        # open. It only keeps memory, until the session ends.
        _method(Lanes, "drop", _nothing),
        Worlds.NONE,
    ),
    # kproxy.routing.routes
    Switch(
        "every route is proven",
        "routes: a route is new until a batch on it has succeeded",
        _method(Routes, "new_among", _no_list),
        Worlds.SOME,
        forgets=True,
    ),
    Switch(
        "a route stays proven when its partition's owner changes, or comes back",
        "routes 2: what is proven at one revision of the partition's ownership is forgotten at the next",
        _method(Routes, "forget_outdated", _nothing),
        Worlds.SOME,
    ),
    Switch(
        "a route is proven by what was sent under an earlier ownership",
        "routes 2",
        # Later batches go to the former owner, are refused there, and then go to the new one. They would be out of
        # order at a broker that forgets and gets the partition back while the batch that probed is unanswered. But
        # batches pipelined to it before are appended whatever the proxy does, so no broker gets a partition back so
        # soon.
        _method(Routes, "prove", _prove_at_any_version),
        Worlds.NONE,
    ),
    # kproxy.routing.retry
    Switch(
        "what may have been appended is sent again, recognisable or not",
        "retry: ambiguous rows",
        _rows((CONNECTION_LOST, UNREADABLE), RetryRule(RetryLimit.TIME, codes.REQUEST_TIMED_OUT)),
    ),
    Switch(
        "what too few replicas have is sent again, recognisable or not",
        "retry: 20 comes after the append",
        _rows((codes.NOT_ENOUGH_REPLICAS_AFTER_APPEND,), RetryRule(RetryLimit.TIME, codes.REQUEST_TIMED_OUT)),
    ),
    Switch(
        "a deposed leader's refusal after its append is sent again",
        "retry, PRODUCE_UNCLEAR: acks=all before brokers that may have appended when they say these",
        _rows((codes.NOT_LEADER_OR_FOLLOWER,), RetryRule(RetryLimit.ATTEMPTS, None), (retry.PRODUCE_UNCLEAR,)),
    ),
    Switch(
        "no code says that the batch comes again",
        "retry, comes_again: what waits behind it must not be sent before",
        _in_module(retry, "_COMES_AGAIN", frozenset()),
    ),
    Switch(
        "what is refused behind a refused batch is told at once",
        "retry, is_held_back: a batch refused with this code, behind one that was refused, is sent again behind it",
        _in_module(retry, "_HELD_BACK", frozenset()),
    ),
    Switch(
        "a refusal is told although an earlier attempt may have been appended",
        "retry, final_code: a refusal of one attempt says nothing of an earlier one",
        _in_module(retry, "_SAY_NOT_APPENDED", frozenset()),
    ),
    Switch(
        "deadlines are too late",
        "retry, deadline_s: before the client's own timer",
        _code(retry.deadline_s, _late),
    ),
    Switch(
        "attempts before the re-read ends count",
        "retry: further attempts until the re-read ends are not among MAX_ATTEMPTS",
        _method(retry.Attempts, "send_blindly", _nothing),
        slow_rereads=True,
    ),
    # kproxy.routing.refused
    Switch(
        "no batch is misled",
        "refused 1: a batch is misled where one before it was refused and has not come again",
        _method(Refused, "misleads", _no),
    ),
    Switch(
        "only the latest refused batch is remembered",
        "refused 1",
        # It needs refusals that are noted in another order than that of their batches, and one out of order between
        # them: these clients wait for all answers before they send anything again. Others could not be judged: a resent
        # batch discards the knowledge, and batches sent behind it before are rightly reported as out of order.
        _method(Refused, "note", _note_the_last_alone),
        Worlds.NONE,
    ),
    Switch(
        "what comes again is still misled",
        "refused, refused -> (unknown)",
        _method(Refused, "arrived", _nothing),
        Worlds.SOME,
    ),
    # kproxy.routing.merge
    Switch(
        "a second result for one partition is taken",
        "merge 1: every partition is answered exactly once",
        # No code today takes one: a late caller first checks whether the entry is open.
        _method(Exchange, "take", _take_twice),
        Worlds.NONE,
    ),
    Switch(
        "any answer of one broker is handed on as it came",
        "merge 2: the answer lists topics and partitions in the request's order",
        _code(merge.answers_in_order, _yes),
    ),
    # kproxy.routing.fanout, the client's end
    Switch(
        "a client that is gone is not parted from its topics with a writer group",
        "fanout 6: once the client is gone nothing more is sent for topics with a writer group",
        _method(Fanout, "parted", _no_list),
        claims=True,
    ),
    Switch(
        "a client whose claim is lost is not severed from anything",
        "fanout 6: once it is severed nothing at all",
        _method(Fanout, "severed", _no_list),
        claims=True,
    ),
    Switch(
        "what waits for its retry goes on when its client is parted or severed",
        "fanout 6",
        _method(ClientEnd, "forbids", _no),
        claims=True,
    ),
    Switch(
        "what is unanswered of a writer who has gone is not held",
        "fanout 6: what a broker has got for such topics is held from that event on until it is answered or lost",
        _method(ClientEnd, "hold", _nothing),
        Worlds.SOME,
        claims=True,
    ),
    Switch(
        "what is written and lost is not noted",
        "actions.NoteLost: these were written to a broker whose answer cannot come any more",
        lambda patch: patch.setitem(cast(dict[Any, Any], _CARRY_OUT), NoteLost, _nothing),
        claims=True,
    ),
    # kproxy.proxy.fanout
    Switch(
        "whether claims are live is not asked when something is written",
        "shell 2: whether claims are live is asked when something is written",
        _method(ClientClaims, "have_lapsed", _have_lapsed_at_a_dial),
        claims=True,
    ),
    Switch(
        "whether claims are live is not asked when a dial completes",
        "shell 2: and again when a dial completes",
        _method(ClientClaims, "have_lapsed", _have_lapsed_at_a_write),
        claims=True,
    ),
    # kproxy.proxy.claims
    Switch(
        "what claimants write stands behind no fence",
        "proxy/claims 1: nothing of a claimed partition is sent on a connection before a binding of its fence",
        _method(FenceBinder, "before", _nothing),
        claims=True,
    ),
    # kproxy.proxy.claims
    Switch(
        "anybody writes to a topic with a writer group",
        "proxy/claims: a topic with a writer group is written by whoever owns its partition, and by nobody else",
        _code(refused_writes, _no_codes),
        claims=True,
    ),
    # kproxy.claims.inflight_writes
    Switch(
        "what is held is settled",
        "unsettled, settled -> held: the connection of a writer ends with something unanswered",
        _method(InflightWrites, "begin", _hold_in_vain),
        claims=True,
    ),
    Switch(
        "claims are given on whatever is unsettled",
        "claims/acquire 3: a claim is granted when nothing of its earlier writers is under way",
        _method(InflightWrites, "blocks", _no),
        claims=True,
    ),
)


def search(switch: Switch, first_seed: int, worlds: int) -> tuple[int, Outcome | None]:
    """The first of that many worlds that notices the rule, and the number of worlds it took."""
    with pytest.MonkeyPatch.context() as patch:
        switch.off(patch)
        for run in range(worlds):
            seed = first_seed + run
            outcome = run_world(
                seed, setting=draw(seed, forgets=switch.forgets, claims=switch.claims, slow_rereads=switch.slow_rereads)
            )
            if outcome.found:
                return run + 1, outcome
    return worlds, None
