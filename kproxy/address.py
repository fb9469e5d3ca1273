"""Represent the host and port at which a server listens or is reached."""

from __future__ import annotations

from typing import NamedTuple


class Address(NamedTuple):
    """A host and a port. `host` has no brackets, even for IPv6; the text has them. Port 0 stands for any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
