"""Load the compiled plain path, if it is built.

The plain path forwards the usual requests in compiled code. `compiled` is the extension, or None without it: then every
request goes through the core (kproxy.routing.fanout), which is the reference. KPROXY_PLAIN: `auto` (the default) uses
the extension where it is built, `off` never, `require` fails without it. An extension that was built from other sources
than those beside it is refused: with newer Python code it could let clients wait for ever.

The classes on the way of a request from socket to socket exist twice, in Python and in the extension
(kproxy/plain/_plain.pyx lists them). docs/performance.md says what a request costs without it (`make bench-quick`, last
column); the docstrings of the trail give their own cost.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from kproxy.errors import StartupError
from kproxy.plain.sources import sources_digest

VARIABLE: Final = "KPROXY_PLAIN"
MODES: Final = ("auto", "off", "require")


def load(mode: str) -> ModuleType | None:
    """Return the extension or None. Raises StartupError if it is required and missing, or outdated, or `mode` bad."""
    if mode not in MODES:
        raise StartupError(f"unknown mode {VARIABLE}={mode} of the plain path; expected one of {', '.join(MODES)}.")
    if mode == "off":
        return None
    try:
        extension = importlib.import_module("kproxy.plain._plain")
    except ImportError as error:
        if mode == "require":
            raise StartupError(
                f"{VARIABLE}=require, but the compiled plain path is not built here ({error}): "
                f"reinstall kproxy where a C compiler and Python's headers are, or give {VARIABLE}=auto."
            ) from error
        return None
    if getattr(extension, "SOURCES", None) != sources_digest(Path(__file__).parent):
        raise StartupError(
            f"The compiled plain path ({extension.__file__}) was built from other sources than this kproxy has: "
            f"run make install in a checkout, else reinstall kproxy; {VARIABLE}=off runs without it."
        )
    return extension


compiled: Final = load(os.environ.get(VARIABLE, "auto"))
if TYPE_CHECKING or compiled is None:
    from kproxy_codec.framing import ReceiveArena
else:
    # Every read of a socket uses it: with Python's, a request of 100 x 100 B costs 8 % more CPU time, and one of
    # 10 x 1 KiB 4 to 6 % (`make bench SECTION=against`).
    ReceiveArena = compiled.ReceiveArena

__all__ = ["ReceiveArena", "compiled"]
