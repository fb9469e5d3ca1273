"""`python -m bench.no_trail serve …`: kproxy with no audit trail at all, which nobody can ask for but a measurement."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from kproxy.__main__ import main
from kproxy.proxy.auditing import Audit
from kproxy.proxy.context import ProxyContext


@contextlib.asynccontextmanager
async def _keep_nothing(_: Audit) -> AsyncIterator[None]:
    yield


def _without_trail(make: Any) -> Any:
    def made(self: ProxyContext, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **{**named, "trail": None})

    return made


if __name__ == "__main__":
    Audit.keep = _keep_nothing  # type: ignore[method-assign]
    ProxyContext.__init__ = _without_trail(ProxyContext.__init__)  # type: ignore[method-assign]
    main()
