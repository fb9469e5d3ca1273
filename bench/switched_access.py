"""`python -m bench.switched_access serve …`: run kproxy, and change what it enforces for its open connections.

Each line on stdin is the name of a state; the same line on stdout says that it is in force. Ways that are compared are
states of the same connections of one process: two processes of one program do not cost the same, nor do two connections
of one process. Acknowledgements are not noted: the trail looks at them twice a second, and that work would be counted
with whatever is measured then.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

from kproxy.__main__ import main
from kproxy.proxy.client_session import ClientSession
from kproxy.proxy.context import ProxyContext

# Each state enforces what the one before it does, and more.
OFF: Final = "off"
SASL: Final = "sasl"
ACLS: Final = "acls"
QUOTAS: Final = "quotas"
STATES: Final = (OFF, SASL, ACLS, QUOTAS)
# What a session has of its own: its gate, its permissions, and its meter.
_Own = tuple[Any, Any, Any]
_sessions: WeakKeyDictionary[ClientSession, _Own] = WeakKeyDictionary()


def _listen() -> None:
    line = sys.stdin.readline()
    if line:
        _enforce(line.strip())
    else:
        asyncio.get_running_loop().remove_reader(sys.stdin)


def _enforce(state: str) -> None:
    at = STATES.index(state)
    for session in _sessions:
        own = _sessions[session] = tuple(
            present if present is not None else kept
            for present, kept in zip((session._gate, session._access, session._meter), _sessions[session], strict=True)
        )
        if None in own:
            raise RuntimeError("the configuration lacks SASL, ACLs or quotas")
        gate, access, meter = own
        session._gate = gate if at >= STATES.index(SASL) else None
        session._access = access if at >= STATES.index(ACLS) else None
        session._meter = session._charging = meter if at >= STATES.index(QUOTAS) else None
        session._fanout.may_write = session._access.may_write if session._access is not None else None
        session._forget_routes()
    sys.stdout.write(f"{state}\n")
    sys.stdout.flush()


def _with_switch(begin: Callable[..., None]) -> Callable[..., Any]:
    contexts: list[ProxyContext] = []

    def made(session: ClientSession, context: ProxyContext, *more: Any) -> None:
        if not contexts:
            contexts.append(copy.copy(context))
            contexts[0].trail = None
            asyncio.get_running_loop().add_reader(sys.stdin, _listen)
        begin(session, contexts[0], *more)
        _sessions[session] = (None, None, None)

    return made


if __name__ == "__main__":
    ClientSession.__init__ = _with_switch(ClientSession.__init__)  # type: ignore[method-assign]
    main()
