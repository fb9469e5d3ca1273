"""Draw random faults of proxies, brokers and links from a seed, and make them while histories of ownership run."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from tests.support.claims.own_site import BROKERS, PROXIES, TTL_S, OwnSite

# In seconds: well below the leases' TTL, just below, and beyond it.
HOLDS: Final = (0.3, TTL_S * 0.75, TTL_S * 1.6)
OF_A_PROXY: Final = (
    *("stopped",) * 3,
    *("killed",) * 2,
    *("terminated", "refused by etcd", "silent to etcd", "its lease is revoked"),
)
OF_A_BROKER: Final = (*("killed",) * 2, "stopped")
HELD_TO_THE_LAST: Final = "held up until all is over"
OF_WAYS: Final = (*("held up",) * 2, *(HELD_TO_THE_LAST,) * 2, "cut")


class Trouble(NamedTuple):
    """One fault. It begins `after_s` seconds after the histories, and lasts `hold_s` seconds; inf: until they end.

    `number` is a proxy's number, a broker's id, or a number of connections.
    """

    what: str
    who: str
    number: int
    after_s: float
    hold_s: float

    def __str__(self) -> str:
        return f"{self.who} {self.number} {self.what} after {self.after_s:.1f} s for {self.hold_s} s"


def troubles(seed: int) -> Iterator[list[Trouble]]:
    """The endless sequence of faults, one batch of histories after another; the same for the same seed."""
    chance = random.Random(seed)
    # Each fault of a proxy at least once before any repeats, so that a short run has most of them.
    of_a_proxy: list[str] = []
    while True:
        found = []
        if chance.random() < 0.5:
            found.append(_trouble(chance, chance.choice(OF_WAYS), "way", chance.randrange(1_000)))
        for number in chance.sample(range(PROXIES), chance.choice((0, 1, 1, 2)) if found else chance.choice((1, 1, 2))):
            if not of_a_proxy:
                of_a_proxy = chance.sample(OF_A_PROXY, len(OF_A_PROXY))
            found.append(_trouble(chance, of_a_proxy.pop(), "proxy", number))
        if chance.random() < 0.25:
            found.append(_trouble(chance, chance.choice(OF_A_BROKER), "broker", chance.choice(BROKERS)))
        yield found


def _trouble(chance: random.Random, what: str, who: str, number: int) -> Trouble:
    return Trouble(what, who, number, chance.uniform(0.2, 1.2), chance.choice(HOLDS))


class Troublemaker:
    """Carries out faults; `faults` has for each proxy the time from which it may have lost its lease."""

    def __init__(self, site: OwnSite) -> None:
        self._site = site
        self.faults: dict[int, float] = {}

    async def make(self, trouble: Trouble) -> None:
        """Carry out one fault, and return when it is over."""
        await asyncio.sleep(trouble.after_s)
        if trouble.who == "broker":
            await self._befall_broker(trouble)
        elif trouble.who == "way":
            await self._befall_ways(trouble)
        else:
            self.faults[trouble.number] = time.monotonic()
            await self._befall_proxy(trouble)

    async def _befall_broker(self, trouble: Trouble) -> None:
        broker = self._site.brokers[trouble.number]
        if trouble.what == "killed":
            await broker.down()
        else:
            broker.signal(signal.SIGSTOP)
        await asyncio.sleep(trouble.hold_s)
        await broker.heal()

    async def _befall_ways(self, trouble: Trouble) -> None:
        """Hold more and more of the connections, including new ones: each client writes on its own."""
        chance = random.Random(trouble.number)
        ways = [each.way for each in self._site.brokers.values()]
        if trouble.what == "cut":
            await asyncio.gather(*(way.cut(lambda _: chance.random() < 0.5) for way in ways))
            return
        until = time.monotonic() + trouble.hold_s
        while time.monotonic() < until:
            for way in ways:
                way.hold(lambda _: chance.random() < 0.2)
            await asyncio.sleep(0.25)
        if trouble.what != HELD_TO_THE_LAST:
            self._site.release()

    async def _befall_proxy(self, trouble: Trouble) -> None:
        proxy = self._site.proxies[trouble.number]
        if trouble.what == "stopped":
            proxy.process.signal(signal.SIGSTOP)
        elif trouble.what == "killed":
            await proxy.down()
        elif trouble.what == "terminated":
            await proxy.terminate()
        elif trouble.what == "its lease is revoked":
            await self._site.revoke_lease(proxy)
        elif trouble.what == "refused by etcd":
            await proxy.way.shut()
        else:
            proxy.way.blackhole()
        await asyncio.sleep(trouble.hold_s)
        await proxy.heal()
