"""How a client came in: by which listener, and from where."""

from __future__ import annotations

from dataclasses import dataclass

from kproxy.routing.fleet import Fleet
from kproxy.security.proxy_protocol import Source


@dataclass(frozen=True, slots=True)
class Reception:
    """`fleet`: the proxies as clients of this listener reach them.

    `source`: the client's address as a load balancer tells it; None: that of the connection.
    """

    listener: str
    fleet: Fleet
    source: Source | None = None
