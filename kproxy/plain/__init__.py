"""The compiled plain path, where it is built.

`compiled` is the extension, None without it: then every request goes through the core (kproxy.routing.fanout), which is
the reference. KPROXY_PLAIN: `auto` (the default) uses the extension where it is built, `off` never, `require` fails
without it.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING, Final

from kproxy.errors import StartupError

VARIABLE: Final = "KPROXY_PLAIN"
MODES: Final = ("auto", "off", "require")


def _load(mode: str) -> ModuleType | None:
    """Raises StartupError if the mode is unknown, or requires an extension that is not built."""
    if mode not in MODES:
        raise StartupError(f"{VARIABLE}={mode} is not a mode of the plain path: give one of {', '.join(MODES)}.")
    if mode == "off":
        return None
    try:
        return importlib.import_module("kproxy.plain._plain")
    except ImportError as error:
        if mode == "require":
            raise StartupError(
                f"{VARIABLE}=require, but the compiled plain path is not built here ({error}): "
                f"reinstall kproxy where a C compiler and Python's headers are, or give {VARIABLE}=auto."
            ) from error
        return None


compiled: Final = _load(os.environ.get(VARIABLE, "auto"))
if TYPE_CHECKING or compiled is None:
    from kproxy_codec.correlation import AwaitedAnswers
    from kproxy_codec.framing import FrameReader, ReceiveArena
else:
    AwaitedAnswers = compiled.AwaitedAnswers
    FrameReader = compiled.FrameReader
    ReceiveArena = compiled.ReceiveArena

__all__ = ["AwaitedAnswers", "FrameReader", "ReceiveArena", "compiled"]
