"""Tell whoever started a serving command that it serves, and the service manager, such as systemd, how it stands.

The manager (sd_notify(3)) names a datagram socket in NOTIFY_SOCKET: a path, or an abstract name behind `@`. Without one
nothing is sent. That it cannot be told is logged and costs nothing else.
"""

from __future__ import annotations

import os
import socket
import sys

import structlog

SOCKET_VARIABLE = "NOTIFY_SOCKET"
# A manager reads at once; one that hangs may not hold up who serves, or stops.
TIMEOUT_S = 1.0

_logger = structlog.get_logger(__name__)


def say_ready(places: str) -> None:
    """The one line on stdout: `places` are where it serves and what it uses, as `kafka=H:P etcd=URL`."""
    line = f"ready {places}"
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    notify("READY=1", f"STATUS={line}")


def say_stopping() -> None:
    """For the service manager alone."""
    notify("STOPPING=1")


def notify(*assignments: str) -> None:
    """Send assignments such as `READY=1` as one message. Waits TIMEOUT_S at most; raises nothing."""
    name = os.environ.get(SOCKET_VARIABLE, "")
    if not name:
        return
    # A line is an assignment.
    message = "\n".join(" ".join(each.splitlines()) for each in assignments)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.settimeout(TIMEOUT_S)
            manager.connect(_address(name))
            manager.sendall(message.encode(errors="replace"))
    except OSError as error:
        _logger.warning("service manager not told", message=message, socket=name, reason=str(error))


def _address(name: str) -> bytes:
    """Raises OSError for what is no address of a Unix socket."""
    address = os.fsencode(name)
    if address[:1] == b"@":
        return b"\0" + address[1:]
    if address[:1] != b"/":
        raise OSError("neither a path nor an abstract name")
    return address
