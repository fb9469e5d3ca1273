"""Whether anybody listens where a command is told that a cluster is; asked before anything is started."""

from __future__ import annotations

import socket
from typing import Final

from kproxy.config import parse_address, split_list
from kproxy.errors import StartupError

CONNECT_TIMEOUT_S: Final = 5.0
START_OR_ADDRESS: Final = "start it (`kproxy dev`), or give its address"


def check_reachable(bootstrap: str, flag: str, way_out: str = START_OR_ADDRESS) -> None:
    """Raises StartupError where nobody listens at any of the addresses."""
    why = ""
    for text in split_list(bootstrap, flag):
        address = parse_address(text, flag)
        try:
            with socket.create_connection((address.host, address.port), timeout=CONNECT_TIMEOUT_S):
                return
        except OSError as error:
            why = error.strerror or str(error)
    raise StartupError(f"nothing answers at {flag} {bootstrap} ({why}): {way_out}.")
