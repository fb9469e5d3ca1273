"""Asking a proxy's admin page, for the commands that show what it says."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from urllib.parse import urlencode

from kproxy.config import Address

ANSWER_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 << 20


class NoAnswer(Exception):
    """Nothing that can be used; a sentence says why and what to do."""


def ask(
    address: Address, path: str, query: Mapping[str, str | None] | None = None, *, order: bytes | None = None
) -> tuple[int, bytes]:
    """Status and body of a page, or of what comes of POSTing `order`, JSON, to it. Raises NoAnswer; blocks."""
    asked = urlencode({name: value for name, value in (query or {}).items() if value is not None})
    connection = http.client.HTTPConnection(*address, timeout=ANSWER_TIMEOUT_S)
    try:
        target = f"{path}?{asked}" if asked else path
        if order is None:
            connection.request("GET", target)
        else:
            connection.request("POST", target, order, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read(MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(
            f"no admin page answers at {address} ({_reason(error)}): start `kproxy dev`, "
            f"name a proxy's page with --admin H:P, or ask etcd with --etcd URL."
        ) from error
    finally:
        connection.close()


def not_ours(address: Address, what: object) -> NoAnswer:
    """What answers there is something else; `what` shows it."""
    return NoAnswer(f"what answers at {address} is no admin page of kproxy ({what}): give another --admin.")


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
