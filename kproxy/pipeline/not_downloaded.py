"""Why Spark's jars could not be downloaded, by what Ivy has written of it; nothing of it is an error code.

Ivy asks one repository after another. Of each it says what it asked for, and apart from that whom it could not reach
and who answered with an error. Who is not among those has answered, and does not have what it was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from kproxy.errors import StartupError

_WHAT: Final = "Spark could not download its Kafka connector"
_MISSING: Final = re.compile(r"\[(?:unresolved dependency|download failed): ([^\s#]+)#([^\s;]+);([^\s:!\]]+)")
_ASKED: Final = re.compile(r"^\s+(https?://\S+)$", re.MULTILINE)
_NO_ACCESS: Final = re.compile(r"Server access error at url (\S+) \((.+)\)")
_NO_HOST: Final = re.compile(r"Host (\S+) not found\. url=(\S+)")
_ERROR: Final = re.compile(r"SERVER ERROR: (.+) url=(\S+)")
_NOT_WHOLE: Final = re.compile(r"\[FAILED +\] .*?: (.+) for (https?://\S+)\. ")
_PROXY: Final = "Your proxy requires authentication."


def not_downloaded(log: str) -> StartupError | None:
    """What to tell where Spark's `log` says that its jars, the Kafka connector above all, could not be downloaded."""
    missing = _MISSING.search(log)
    if missing is None:
        return None
    named = ":".join(missing.groups())
    if failed := _ERROR.search(log):
        return StartupError(f"{_WHAT}: {failed[2]} answered with an error ({failed[1]}). Run it again later.")
    if cut := _NOT_WHOLE.search(log):
        return StartupError(f"{_WHAT}: {cut[2]} did not come whole ({cut[1]}). Run it again.")
    if _PROXY in log:
        return StartupError(f"{_WHAT}: the network's proxy wants to know who asks. Ask who runs it, or use a mirror.")
    reasons = dict(_NO_ACCESS.findall(log))
    reasons |= {url: f"host {host} not found" for host, url in _NO_HOST.findall(log)}
    unreached = {_repository(url): reason for url, reason in reversed(reasons.items())}
    answered = [each for each in _repositories(_ASKED.findall(log)) if each not in unreached]
    if unreached and not answered:
        url, reason = next(iter(reasons.items()))
        return StartupError(f"{_WHAT} from {url} ({reason}): check the network and run it again.")
    asked = " and ".join(answered) or "the repository"
    besides = "".join(f", and {each} could not be asked ({reason})" for each, reason in unreached.items())
    return StartupError(
        f"{_WHAT}: {asked} answered and {'do' if len(answered) > 1 else 'does'} not give {named}{besides}. Use a "
        "release of PySpark that is there, or ask who runs the mirror or the network's proxy."
    )


def _repositories(urls: Iterable[str]) -> list[str]:
    """Each once, in their order."""
    return list(dict.fromkeys(map(_repository, urls)))


def _repository(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
