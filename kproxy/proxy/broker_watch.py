"""Watch the brokers of one proxy: which APIs each serves, whether it can be reached, and whether it hangs.

Each broker has a `BrokerWatch`, which asks it ApiVersions (KIP-35) on a connection of the proxy's own. The answer
decides about the versions that clients are offered (kproxy.proxy.api_versions), the broker's breaker
(kproxy.routing.broker_health) and `/readyz`. `Brokers` has the watches of all brokers, and the versions and features
that these have in common.

| a broker is asked | |
| --- | --- |
| while it is unknown | at once, then with a pause (`look`, `current`) |
| while a request to it waits (`suspect`) | at once, and again PROBE_PAUSE_S after each answer: it is probed |
| while it hangs | again and again, until it answers, refuses, or closes the connection |
| for `/readyz` (`problem`) | at most once every FRESH_S |

A known broker that is idle or answers promptly is not asked.

States of a broker
  unknown    it has never reported what it serves
  known      it has, and the connection of that report is open
  outdated   its last answer still counts, but the broker may be another version by now: it has left and come back,
             changed its address, or closed that connection (as a broker does that is restarted)

Transitions
  unknown, outdated -> known      it answers
  known -> outdated               its connection ends, or its address changes
  any -> any                      a broker that leaves keeps its last answer, in case it comes back

Invariants
1. One task asks a broker, one question at a time, however many wait for the answer; `close` ends all tasks.
2. A task begins with a new connection: the network may have cut off the idle one, and that is not a hang. A broker
   hangs if it answers neither the question within `probe_timeout_s` nor a client meanwhile; one question is enough.
3. An unknown broker does not count for the offer. It cannot be told from one that serves everything, and a broker that
   never starts must not stop the others. Once it answers, APIs that it does not serve are withdrawn, as when a broker
   joins. Nothing relies on its fences (the Own API's) either, nor on its producer state: a batch that it may have
   appended is not sent to it a second time.
4. `offered` is `offer` of the last answers of the brokers in the topology. `on_change` is called once for each change
   of its ranges, after the change. Changes are logged once all brokers known at first have been asked.
5. A broker that hangs, or could not be asked, is doubted (kproxy.routing.topology) until it answers.
6. `on_open` is called for every breaker that opens, after `is_hung` is true. `on_lost` is called whenever `look` asks a
   broker again, as it is outdated or could not be asked: no other open connection may notice that it is gone.
7. At most MAX_GONE brokers that have left are remembered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final

import structlog

from kproxy.config import Limits
from kproxy.observe.metrics import BrokerVitals
from kproxy.observe.tally import Tally
from kproxy.proxy.api_versions import (
    ASKED_VERSIONS,
    FENCES,
    PRODUCER_IDS,
    BrokerApis,
    OfferedApis,
    ask_versions,
    changes,
    covers,
)
from kproxy.proxy.apis import Ranges
from kproxy.proxy.broker_connection import Lost, Upstream
from kproxy.proxy.dialling import BrokerDials, Dialler
from kproxy.routing.broker_health import PROBE_PAUSE_S, SUSPICIOUS_S, Breaker
from kproxy.routing.topology import Address, Topology
from kproxy_codec import api_keys as keys
from kproxy_codec.errors import CodecError

log = structlog.get_logger(__name__)

# The longest time that `current` waits for a broker.
ASK_TIMEOUT_S = 2.0
# The pause after a broker did not answer: one that is silent must not hold up every new client.
SILENT_FOR_S = 10.0
UNREACHABLE_FOR_S = 2.0
# `/readyz` believes an answer, or the lack of one, for so long.
FRESH_S = 1.0
# Kafka and etcd drop a broker soon after it dies, and an alert needs its series for longer.
GONE_FOR_S: Final = 600.0
MAX_GONE: Final = 1000
# Lets brokers' logs distinguish probes from other requests.
_PROBE_ID: Final = b"kproxy-probe"
_CLIENT_ID: Final = b"kproxy-versions"


class _Failure(Enum):
    CUT_OFF = "it refused or closed the connection"
    SILENCE = "it did not answer in time"


class BrokerWatch(BrokerDials):
    """One broker at one address, and the proxy's own connection to it."""

    def __init__(self, brokers: Brokers, owner: int, address: Address) -> None:
        super().__init__(owner, address, brokers.dialler)
        self._brokers = brokers
        # The broker's last answer; None before the first.
        self.apis: BrokerApis | None = None
        self.breaker = Breaker(brokers.limits.probe_timeout_s)
        # The time when it left the topology; inf while it is in the topology.
        self.left_at = inf
        # When the latest question began, when one was answered, and when `look` may ask again.
        self.asked_at = self.answered_at = self.due_at = -inf
        self._connection: Upstream | None = None
        # Whether the latest question was answered.
        self._answer: asyncio.Future[bool] | None = None
        self._task: asyncio.Task[None] | None = None
        # A request still waits, as reported after the latest question began.
        self._is_suspected = False
        # While the task runs: whether the answer was known before.
        self._was_known = False

    @property
    def is_hung(self) -> bool:
        """Whether it hangs: nothing is to be sent to it."""
        return self.breaker.is_open

    @property
    def is_well(self) -> bool:
        """Whether it is not known to be in trouble: it does not hang, and the last dial succeeded."""
        return not self.is_hung and not self.is_down

    @property
    def refuses(self) -> bool:
        """Whether a request to it would be lost unwritten, at once: it hangs, or is down."""
        return self.is_hung or super().refuses

    @property
    def is_known(self) -> bool:
        if self._task is not None:
            return self._was_known
        return self._connection is not None and not self._connection.closed

    @property
    def is_asked(self) -> bool:
        """Whether a question is under way."""
        return self._answer is not None and not self._answer.done()

    @property
    def is_here(self) -> bool:
        """Whether the topology has it at this address."""
        return self._brokers.topology.address(self.owner) == self.address

    def suspect(self) -> None:
        """Probe it: a request has waited for SUSPICIOUS_S."""
        self._is_suspected = True
        self.ask()

    def ask(self) -> asyncio.Future[bool]:
        """Ask, unless a task is at it; the future tells whether the latest question is answered."""
        if self._task is not None and self._answer is not None:
            return self._answer
        is_known = self.is_known
        answer = self._begin()
        if self._brokers.is_closed:
            answer.set_result(False)
        else:
            self._was_known = is_known
            self._brokers.asking.add(self)
            self._task = asyncio.get_running_loop().create_task(self._ask_on())
        return answer

    def _begin(self) -> asyncio.Future[bool]:
        self.asked_at = self._brokers.clock()
        self._answer = asyncio.get_running_loop().create_future()
        return self._answer

    async def _ask_on(self) -> None:
        """Ask, and ask again while requests wait or the broker hangs."""
        try:
            if self._connection is not None:
                await self._connection.close()
            while True:
                is_probe = self._is_suspected or self.is_hung
                self._is_suspected = False
                self.breaker.asked(self.asked_at)
                reply = await self._reply(_PROBE_ID if is_probe else _CLIENT_ID)
                self._note(reply, is_probe=is_probe)
                if reply is not _Failure.SILENCE and is_probe:
                    await asyncio.sleep(PROBE_PAUSE_S)
                is_wanted = self._is_suspected or self.is_hung
                if not is_wanted or (reply is _Failure.SILENCE and not self.is_here):
                    return
                self._begin()
        except Exception:  # the boundary: without its task this broker's breaker is closed
            log.exception("broker probe failed", broker=self.owner, address=str(self.address))
            self.due_at = self._brokers.clock() + SILENT_FOR_S
            self._brokers.topology.doubt(self.owner, doubted=False)
        finally:
            self._task = None
            self._brokers.asking.discard(self)
            self.breaker = Breaker(self._brokers.limits.probe_timeout_s)
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(False)
            if self.left_at < inf:
                self.hang_up()

    async def _reply(self, client_id: bytes) -> BrokerApis | _Failure:
        """Send one question, in an older version where the newer one is refused, and return the answer."""
        failure = _Failure.CUT_OFF
        try:
            async with asyncio.timeout(self.breaker.patience_s):
                for version in ASKED_VERSIONS:
                    connection = self._open()
                    try:
                        return await ask_versions(connection, version, client_id)
                    except Lost as lost:
                        if not lost.written:
                            break
                    except CodecError as error:
                        if version == ASKED_VERSIONS[-1]:
                            connection.distrust(str(error))
        except TimeoutError:
            failure = _Failure.SILENCE
        # Also after silence: packets lost in the network of a hung host are repeated ever more slowly; a new connection
        # gets through sooner.
        if self._connection is not None:
            await self._connection.close()
        return failure

    def _open(self) -> Upstream:
        """The open connection, or a new one."""
        if self._connection is None or self._connection.closed:
            self._connection = Upstream(
                self,
                is_paced=False,
                max_answer_bytes=self._brokers.limits.max_control_request_bytes,
                # The patience of the question ends first: a dial that hangs counts as silence.
                connect_timeout_s=self.breaker.patience_s + 1,
            )
        return self._connection

    def _note(self, reply: BrokerApis | _Failure, *, is_probe: bool) -> None:
        """Note the end of a question, and tell those who wait for it."""
        brokers, now = self._brokers, self._brokers.clock()
        took_s = now - self.asked_at
        if reply is not _Failure.CUT_OFF and (is_probe or took_s >= SUSPICIOUS_S):
            brokers.tally.probe(self.owner, took_s)
        if reply is _Failure.SILENCE:
            self.due_at = now + SILENT_FOR_S
            if self.breaker.silent():
                patience_s = brokers.limits.probe_timeout_s
                brokers.tally.hang(self.owner)
                log.warning("broker hangs", broker=self.owner, address=str(self.address), unanswered_s=patience_s)
                self._doubt(True)
                brokers.on_open(self.address)
        else:
            self._was_known = isinstance(reply, BrokerApis)
            self._doubt(not self._was_known)
            if isinstance(reply, BrokerApis):
                self.apis, self.answered_at, self.due_at, reason = reply, now, -inf, "it answered"
            else:
                self.due_at, reason = now + UNREACHABLE_FOR_S, reply.value
            if self.breaker.answered():
                log.info("broker answers again", broker=self.owner, address=str(self.address), reason=reason)
        if self._answer is not None:
            self._answer.set_result(isinstance(reply, BrokerApis))
        brokers.noted()

    def _doubt(self, doubted: bool) -> None:
        if self.is_here:
            self._brokers.topology.doubt(self.owner, doubted=doubted)

    def hang_up(self) -> None:
        """Close the connection of a broker that has left; the task closes it if it is being asked."""
        if self._task is None and self._connection is not None and not self._connection.closed:
            self._connection.give_up("its broker has left")

    async def close(self) -> None:
        """Stop asking, and close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._connection is not None:
            await self._connection.close()


@dataclass(eq=False)
class Brokers:
    """The brokers of `topology`. `offer` works out what clients are offered."""

    topology: Topology
    limits: Limits
    tally: Tally
    dialler: Dialler
    offer: Callable[[Sequence[BrokerApis]], OfferedApis]

    def __post_init__(self) -> None:
        self.clock = self.dialler.clock
        self._watches: dict[tuple[int, Address], BrokerWatch] = {}
        # The watches whose task runs; without any, no breaker is open.
        self.asking: set[BrokerWatch] = set()
        # The topology's version at the last `follow`.
        self._followed = -1
        self.is_closed = False
        # APIs that brokers list but do not serve.
        self._disproved: set[int] = set()
        # The topology's version, and `keep_producer_state` for it.
        self._kept_state: tuple[int, bool] | None = None
        self.offered = self.offer([])
        # The last logged state; nothing is logged before the first round of probes ends.
        self._logged = self.offered
        self._is_logging = False
        self.on_change: Callable[[Ranges], None] = lambda ranges: None
        self.on_open: Callable[[Address], None] = lambda address: None
        self.on_lost: Callable[[], None] = lambda: None

    def change(self, limits: Limits) -> None:
        """Use other limits."""
        self.limits = limits
        for watch in self._watches.values():
            if watch not in self.asking:
                watch.breaker = Breaker(limits.probe_timeout_s)

    # The topology

    def at(self, owner: int, address: Address) -> BrokerWatch:
        """The watch of a broker at an address."""
        watch = self._watches.get((owner, address))
        if watch is None:
            watch = BrokerWatch(self, owner, address)
            watch.left_at = inf if watch.is_here else self.clock()
            said = [each.apis for each in self._watches.values() if each.owner == owner and each.apis is not None]
            watch.apis = said[-1] if said else None
            self._watches[owner, address] = watch
        elif watch.left_at < inf and watch.is_here:
            # It is back; what was counted of it may have been forgotten.
            watch.counts, watch.left_at = self.tally.of_broker(owner), inf
        return watch

    def follow(self) -> None:
        """Follow the topology; call it regularly."""
        if self.topology.version == self._followed:
            return
        self._followed = self.topology.version
        for owner, address in self.topology.brokers.items():
            self.at(owner, address)
        for key, watch in list(self._watches.items()):
            if not watch.is_here and watch.left_at == inf:
                watch.left_at = self.clock()
                watch.hang_up()
                # The brokers that left last come last.
                self._watches[key] = self._watches.pop(key)
        for watch in self._gone[:-MAX_GONE]:
            del self._watches[watch.owner, watch.address]
        self._update()

    @property
    def _here(self) -> list[BrokerWatch]:
        """The watches of the brokers in the topology, as of the last `follow`."""
        return [watch for watch in self._watches.values() if watch.left_at == inf]

    @property
    def _gone(self) -> list[BrokerWatch]:
        """The watches of the others, in the order in which they left."""
        return [watch for watch in self._watches.values() if watch.left_at < inf]

    def vitals(self) -> dict[int, BrokerVitals]:
        """Whether each broker is well and whether it hangs, by its id.

        A broker that has left is not well. After GONE_FOR_S it is not listed, and its counters are forgotten.
        """
        self.follow()
        left_after = self.clock() - GONE_FOR_S
        gone = [watch.owner for watch in self._gone if watch.left_at > left_after]
        vitals = dict.fromkeys(gone, BrokerVitals(False)) | {
            watch.owner: BrokerVitals(watch.is_well, watch.is_hung) for watch in self._here
        }
        for watch in self._gone:
            if watch.owner not in vitals:
                self.tally.forget(watch.owner)
        return vitals

    # Failures

    def is_hung(self, address: Address | None) -> bool:
        """Whether the broker there hangs."""
        return bool(self.asking) and any(watch.address == address and watch.is_hung for watch in self.asking)

    def is_well(self, owner: int) -> bool:
        """Whether a broker of the topology is not known to be in trouble."""
        address = self.topology.address(owner)
        return address is not None and self.at(owner, address).is_well

    def heard(self, address: Address, since: float) -> None:
        """Note that the broker there has answered a client's request, not earlier than `since`."""
        for watch in self.asking:
            if watch.address == address:
                watch.breaker.heard(since)

    # APIs

    def _apis(self, owner: int) -> BrokerApis | None:
        address = self.topology.address(owner)
        return None if address is None else self.at(owner, address).apis

    def has_fences(self, broker: int) -> bool | None:
        """Return whether a broker keeps fences (serves BindFences).

        None for an unknown broker, and for one that is not in the topology.
        """
        apis = self._apis(broker)
        return None if apis is None else covers(apis.ranges, FENCES)

    def may_have_fences(self, broker: int) -> bool:
        """Return whether to send fences to a broker.

        An unknown broker counts as keeping fences if any other does.
        """
        known = self.has_fences(broker)
        return any(map(self.has_fences, self.topology.brokers)) if known is None else known

    @property
    def fenced(self) -> bool:
        """Whether all known brokers keep fences, and there are any.

        Call `current` first: this property asks no broker. An unknown broker does not count: it is asked when it is to
        keep a fence for a partition that it leads.
        """
        said = [known for broker in self.topology.brokers if (known := self.has_fences(broker)) is not None]
        return bool(said) and all(said)

    @property
    def keep_producer_state(self) -> bool:
        """Whether all brokers that answer keep producer state.

        Brokers that assign producer ids keep it.
        """
        version = self.topology.version
        if self._kept_state is None or self._kept_state[0] != version:
            said = [self._apis(broker) for broker in self.topology.takers]
            knows = bool(said) and all(apis is not None and covers(apis.ranges, PRODUCER_IDS) for apis in said)
            self._kept_state = (version, knows and keys.INIT_PRODUCER_ID not in self._disproved)
        return self._kept_state[1]

    def disprove(self, api_key: int) -> None:
        """Count an API as not served by brokers, whatever they say."""
        self._disproved.add(api_key)
        self._update()

    def noted(self) -> None:
        """Record the end of a question."""
        self._update()
        if not self._is_logging and not self.is_closed and not any(watch.is_asked for watch in self._here):
            self._is_logging = True
            self._log_changes()

    def _update(self) -> None:
        """Work out what is offered, and report a change."""
        self._kept_state = None
        said = [watch.apis.without(self._disproved) for watch in self._here if watch.apis is not None]
        before, self.offered = self.offered, self.offer(said)
        if self.offered.ranges != before.ranges:
            self.on_change(self.offered.ranges)
        if self._is_logging:
            self._log_changes()

    def _log_changes(self) -> None:
        before, self._logged = self._logged, self.offered
        if self._logged.native != before.native:
            log.info("APIs of the proxy changed", apis=sorted(map(keys.name_of, self._logged.native)))
        if self._logged.ranges != before.ranges:
            brokers = sum(watch.apis is not None for watch in self._here)
            log.info("APIs offered to clients changed", brokers=brokers, **changes(before.ranges, self._logged.ranges))

    # Requests to brokers

    def look(self) -> None:
        """Follow the topology, and ask brokers that are not known and due; call it regularly."""
        self.follow()
        now = self.clock()
        for watch in self._here:
            if not watch.is_known and watch not in self.asking and now >= watch.due_at and not self.is_closed:
                if watch.asked_at > -inf:
                    self.on_lost()
                watch.ask()

    async def current(self) -> OfferedApis:
        """Ask every broker that is due, and return what is offered then.

        This takes ASK_TIMEOUT_S at most.
        """
        self.look()
        asked = [watch for watch in self._here if watch.is_asked and not watch.is_known and not watch.is_hung]
        left_s = max((watch.asked_at for watch in asked), default=-inf) + ASK_TIMEOUT_S - self.clock()
        if left_s > 0:
            await asyncio.wait([watch.ask() for watch in asked], timeout=left_s)
        return self.offered

    async def problem(self) -> str | None:
        """Return the reason why no broker can be used; None where one answers."""
        self.follow()
        # The broker that answered last is usually enough.
        brokers = sorted(self._here, key=lambda watch: -watch.answered_at)
        if not brokers:
            return "no broker is known"
        if await self._any_answers(brokers[:1]) or await self._any_answers(brokers[1:]):
            return None
        return f"no broker answers: {len(brokers)} asked"

    async def _any_answers(self, brokers: list[BrokerWatch]) -> bool:
        """Whether a broker answers; a connection is not enough, as a stopped process's kernel accepts it."""
        fresh_from = self.clock() - FRESH_S
        if any(watch.answered_at > fresh_from and not watch.is_hung for watch in brokers):
            return True
        due = [watch for watch in brokers if watch.is_asked or watch.asked_at <= fresh_from]
        waiting = {watch.ask() for watch in due if not watch.is_hung}
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.connect_timeout_s + self.dialler.access.extra_s):
                while waiting:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    if any(answer.result() for answer in done):
                        return True
        return False

    async def close(self) -> None:
        """End all asking, and close the connections."""
        self.is_closed = True
        watches = dict.fromkeys([*self._watches.values(), *self.asking])
        await asyncio.gather(*(watch.close() for watch in watches))
