"""Describe how a client connected: its listener, its address, and how it has to authenticate."""

from __future__ import annotations

from dataclasses import dataclass

from kproxy.proxy.admission import Admission
from kproxy.routing.fleet import Fleet
from kproxy.security.proxy_protocol import Source


@dataclass(frozen=True, slots=True)
class Reception:
    """`fleet`: the proxies as clients of this listener reach them.

    `source`: the client's address as a load balancer reports it; None: that of the connection.
    `admission` None: the client needs no proof of who it is.
    """

    listener: str
    fleet: Fleet
    source: Source | None = None
    admission: Admission | None = None
