"""Report that the process is ready, waits or stops, to its user and to the service manager.

The manager, such as systemd (sd_notify(3)), names a datagram socket in NOTIFY_SOCKET: a path, or an abstract name after
`@`. Without NOTIFY_SOCKET nothing is sent. A failure to send is logged and has no other effect.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable

import structlog

SOCKET_VARIABLE = "NOTIFY_SOCKET"
# A manager reads at once. A manager that hangs must not delay serving or stopping.
TIMEOUT_S = 1.0

_logger = structlog.get_logger(__name__)


def say_ready(places: str) -> None:
    """Print the ready line.

    `places` lists the addresses that the process serves and uses, such as `kafka=H:P etcd=URL`.
    """
    line = f"ready {places}"
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    notify("READY=1", f"STATUS={line}")


def say_stopping() -> None:
    """Report to the service manager that the process is stopping."""
    notify("STOPPING=1")


def notify(*assignments: str) -> None:
    """Send assignments such as `READY=1` as one message.

    Waits TIMEOUT_S at most; raises nothing.
    """
    name = os.environ.get(SOCKET_VARIABLE, "")
    if not name:
        return
    # The manager reads each line as one assignment.
    message = "\n".join(" ".join(each.splitlines()) for each in assignments)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.settimeout(TIMEOUT_S)
            manager.connect(_address(name))
            manager.sendall(message.encode(errors="replace"))
    except OSError as error:
        _logger.warning("service manager not notified", message=message, socket=name, reason=str(error))


def _address(name: str) -> bytes:
    """Convert the socket's name. Raises OSError if it is not the address of a Unix socket."""
    address = os.fsencode(name)
    if address[:1] == b"@":
        return b"\0" + address[1:]
    if address[:1] != b"/":
        raise OSError("neither a path nor an abstract name")
    return address


# A sentence that is still true is printed again after this time, in seconds.
REMIND_S = 60.0
MAX_SENTENCES = 16


class Reminders:
    """Decide which sentences are due. `clock` is in seconds.

    Attempts may fail for different reasons, so each sentence has its own time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said: dict[str, float] = {}

    def is_due(self, sentence: str) -> bool:
        """Return whether to print it now. If so, it is not due again for REMIND_S."""
        now = self._clock()
        said_at = self._said.pop(sentence, None)
        due = said_at is None or now - said_at >= REMIND_S
        self._said[sentence] = now if said_at is None or due else said_at
        if len(self._said) > MAX_SENTENCES:
            del self._said[next(iter(self._said))]
        return due


def say_waiting(sentence: str) -> None:
    """Print `sentence`, which names the obstacle and the remedy, and report it to the service manager."""
    sys.stderr.write(f"kproxy: {sentence} Waiting for it.\n")
    sys.stderr.flush()
    notify(f"STATUS={sentence} Waiting for it.")
