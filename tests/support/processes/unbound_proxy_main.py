"""Run `kproxy` without the confirmation of a partition's owner.

Run it with `python -m tests.support.processes.unbound_proxy_main serve …`.
No fence is ever bound at a broker, neither when a claim is made nor before the first batch on a connection. Everything
else is unchanged: claims wait for every proxy, and a connection that lost one is severed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from kproxy.cli import main
from kproxy.proxy.claims import FenceBinder
from kproxy_codec.error_codes import NONE
from kproxy_codec.own import FenceBinding


async def _bound(self: FenceBinder, bindings: Sequence[FenceBinding], deadline: float) -> dict[tuple[str, int], int]:
    return {binding[:2]: NONE for binding in bindings}


def _not_before(self: FenceBinder, *_: Any) -> None:
    return


def switch_off() -> None:
    FenceBinder.bind = _bound  # type: ignore[method-assign]
    FenceBinder.before = _not_before  # type: ignore[method-assign]


if __name__ == "__main__":
    switch_off()
    sys.exit(main())
