"""`python -m bench.switched_access serve …`: kproxy whose listeners enforce different things, by their names.

All are measured in one process, because no two processes cost the same. Acknowledgements are not noted: the trail looks
at them twice a second, and that work would be counted with whatever is measured then.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Final

from kproxy.__main__ import main
from kproxy.proxy.client_session import ClientSession
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.reception import Reception

WITHOUT: Final = "without"
AGAIN: Final = "without-again"
SASL: Final = "sasl"
ACLS: Final = "acls"
QUOTA: Final = "quota"
QUOTA_BY_CLIENT_ID: Final = "quota-by-client-id"
LISTENERS: Final = (WITHOUT, AGAIN, SASL, ACLS, QUOTA, QUOTA_BY_CLIENT_ID)
OPEN: Final = (WITHOUT, AGAIN)


def _context_of(listener: str, context: ProxyContext) -> ProxyContext:
    switched = copy.copy(context)
    switched.trail = None
    if listener in (*OPEN, SASL):
        switched.access = None
    if listener in (*OPEN, SASL, ACLS):
        switched.quotas = None
    return switched


def _with_switch(begin: Callable[..., None]) -> Callable[..., Any]:
    contexts: dict[str, ProxyContext] = {}

    def made(session: ClientSession, context: ProxyContext, on_closed: Any, reception: Reception) -> None:
        listener = reception.listener
        if listener not in contexts:
            contexts[listener] = _context_of(listener, context)
        if listener in OPEN:
            reception = dataclasses.replace(reception, admission=None)
        begin(session, contexts[listener], on_closed, reception)

    return made


if __name__ == "__main__":
    ClientSession.__init__ = _with_switch(ClientSession.__init__)  # type: ignore[method-assign]
    main()
