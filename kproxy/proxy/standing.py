"""Whether what a client has sent may still be sent on: its connection may have ended, or what it claimed have lapsed.

States of a client connection
  present   all may be sent
  parted    the client is gone: of topics with a writer group nothing more is sent, whatever its acks
  severed   what it had claimed is another's: nothing more is sent at all

Transitions
  present         -> parted    `part`; there is no such state where no topic has a writer group
  present, parted -> severed   `part(severed=True)`
"""

from __future__ import annotations

from codec.api_keys import PRODUCE
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.owning import Owning
from kproxy.routing.merge import Exchange
from kproxy.routing.split import Entry


class Standing:
    """Of one client connection."""

    def __init__(self, context: ProxyContext) -> None:
        self._own = context.own
        # Where topics have writer groups: what is to be settled when their writers end.
        self.settlement = context.own.settlement if context.own is not None and context.own.gated else None
        # What its client has claimed, once it has claimed anything.
        self.owning: Owning | None = None
        self.is_parted = False
        self._is_severed = False

    def part(self, *, severed: bool) -> bool:
        """The client is gone; whether that changes what may be sent."""
        if self.settlement is None and not severed:
            return False
        self.is_parted = True
        self._is_severed = self._is_severed or severed
        return True

    def is_over(self, exchange: Exchange, entry: Entry) -> bool:
        """Whether the connection has ended in a way that lets this not be sent any more."""
        if self._is_severed or not self.is_parted or self.settlement is None:
            return self._is_severed
        return exchange.api.api_key == PRODUCE and exchange.topic(entry).name in self.settlement.topics

    def lapses(self) -> bool:
        """Sever the client where what it claimed may be another's by now; whether it was.

        What was let through waits for a dial or a retry, and time may have passed without this process.
        """
        own, owning = self._own, self.owning
        if own is None or owning is None or owning.holdings.group is None or own.is_live():
            return False
        owning.holdings.sever("its claims may be others' by now: the proxy's lease in etcd is not certain to live")
        return True
