"""`python -m bench.switched_trail serve …`: kproxy whose trail can be switched. After SIGUSR1 it keeps no trail of new
connections, after SIGUSR2 it does again. Both are measured in one process, because no two processes cost the same.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from kproxy.__main__ import main
from kproxy.proxy.context import ProxyContext
from kproxy.trail.trail import Trail


def _switched(context: ProxyContext, trail: Trail | None) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        context.trail = trail

    return handle


def _with_switches(after: Callable[[ProxyContext], None]) -> Callable[[ProxyContext], Any]:
    def made(context: ProxyContext) -> None:
        after(context)
        signal.signal(signal.SIGUSR1, _switched(context, None))
        signal.signal(signal.SIGUSR2, _switched(context, context.trail))

    return made


if __name__ == "__main__":
    ProxyContext.__post_init__ = _with_switches(ProxyContext.__post_init__)  # type: ignore[method-assign]
    main()
