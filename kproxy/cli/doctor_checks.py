"""What `kproxy doctor` looks at. Each check gives findings and fails for nothing it may find."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import re
import ssl
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kproxy.config import Address
from kproxy.config.etcd import EtcdOptions, tls_context
from kproxy.errors import StartupError
from kproxy.ownership.etcd import EtcdClient, EtcdDenied, EtcdError, EtcdStatus
from kproxy.ownership.etcd.target import parse_endpoints

# The first releases without the known faults in leases: revoked early (before 3.5.13), renewals confirmed of leases
# that had been revoked (before 3.5.23, 3.6.5), and what was mended since.
FIT = {(3, 5): 33, (3, 6): 14}
ANSWER_TIMEOUT_S = 5.0
# Certificates and logs go by the wall clock; the rules about leases do not.
CLOCK_TOLERANCE_S = 5.0
# HTTP tells the time in whole seconds.
CLOCK_GRAIN_S = 1.0
MAX_ANSWER_BYTES = 64 << 10


class Finding(NamedTuple):
    """One line: `mark` is ok, warn or FAIL."""

    mark: str
    text: str


async def examine_etcd(endpoints: Sequence[str], options: EtcdOptions, prefix: str) -> list[Finding]:
    """Each member by itself, and then whether they belong together."""
    try:
        parse_endpoints(endpoints)
    except EtcdError as error:
        return [Finding("FAIL", str(error))]
    looked = await asyncio.gather(*(_member(endpoint, options, prefix) for endpoint in endpoints))
    findings = [finding for found, _ in looked for finding in found]
    statuses = [status for _, status in looked if status is not None]
    if len({status.cluster_id for status in statuses}) > 1:
        findings.append(Finding("FAIL", "the members named belong to different clusters: name those of one."))
    if len({status.member_id for status in statuses}) < len(statuses):
        findings.append(Finding("warn", "one member is named twice: name each once, or its loss counts for two."))
    if len(endpoints) < 3:
        findings.append(
            Finding("warn", f"{len(endpoints)} of etcd's members named: with three, any one of them may fail.")
        )
    elif 2 * len(statuses) <= len(endpoints):
        findings.append(Finding("FAIL", "no majority of the members answers: owners cannot change."))
    return findings


async def _member(endpoint: str, options: EtcdOptions, prefix: str) -> tuple[list[Finding], EtcdStatus | None]:
    client = EtcdClient([endpoint], options, timeout_s=ANSWER_TIMEOUT_S)
    try:
        status = await client.connect()
        began = time.monotonic()
        permitted = await _may_read(client, f"{prefix}/")
        took_ms = (time.monotonic() - began) * 1000
    except EtcdError as error:
        return [Finding("FAIL", str(error))], None
    finally:
        await client.close()
    tls = "TLS" if endpoint.strip().lower().startswith("https") else "no TLS"
    user = f"user {options.username}" if options.username else "no user"
    role = "leads" if status.leader_id == status.member_id else "follows"
    findings = [
        Finding("ok", f"{endpoint}: etcd {status.version}, {tls}, {user}, {role}, answers in {took_ms:.0f} ms"),
        *([] if permitted else [Finding("FAIL", f"{endpoint}: this user may not read the keys under {prefix}/.")]),
        *(Finding("FAIL", f"{endpoint}: etcd raises an alarm: {alarm}.") for alarm in status.errors),
        *_about_version(endpoint, status.version),
        *await _about_clock(endpoint, options),
    ]
    return findings, status


async def _may_read(client: EtcdClient, prefix: str) -> bool:
    try:
        await client.get_snapshot(prefix)
    except EtcdDenied:
        return False
    return True


def _about_version(endpoint: str, version: str) -> list[Finding]:
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None:
        return [Finding("warn", f"{endpoint}: {version!r} is no version that is known here.")]
    major, minor, patch = map(int, numbers.groups())
    if (major, minor) > max(FIT) or patch >= FIT.get((major, minor), patch + 1):
        return []
    wanted = " or ".join(f"{major}.{minor}.{patch}" for (major, minor), patch in FIT.items())
    return [Finding("warn", f"{endpoint}: etcd {version} has known faults in its leases: use {wanted} or later.")]


async def _about_clock(endpoint: str, options: EtcdOptions, clock: Callable[[], float] = time.time) -> list[Finding]:
    """etcd tells the time in the head of its HTTP answers."""
    (parsed,) = parse_endpoints([endpoint])
    try:
        context = await asyncio.to_thread(tls_context, options) if parsed.tls else None
        name = (options.server_name or parsed.host) if parsed.tls else None
        _, head = await _get(Address(parsed.host, parsed.port), "/version", context, name)
    except (OSError, TimeoutError, StartupError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return [Finding("warn", f"{endpoint}: the member's clock could not be read.")]
    told = re.search(r"(?im)^date: *(.+?)\r?$", head)
    if told is None:
        return []
    ahead_s = email.utils.parsedate_to_datetime(told[1]).timestamp() - clock()
    if abs(ahead_s) <= CLOCK_TOLERANCE_S + CLOCK_GRAIN_S:
        return []
    which = "ahead of" if ahead_s > 0 else "behind"
    text = f"{endpoint}: its clock is {abs(ahead_s):.0f} s {which} this machine's: certificates and logs go by it."
    return [Finding("warn", text)]


async def examine_proxy(address: Address) -> list[Finding]:
    """What a proxy says of itself on its admin page."""
    try:
        status, text = await _get(address, "/readyz")
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
        return [
            Finding(
                "FAIL",
                f"no admin page answers at {address} ({reason}): start kproxy, or name its page with --admin H:P.",
            )
        ]
    said = text.partition("\r\n\r\n")[2].strip().splitlines() or [""]
    if status == 200:
        return [Finding("ok" if said[0] == "ready" else "warn", f"the proxy at {address}: {said[0][:500]}")]
    if status == 503:
        return [Finding("FAIL", f"the proxy at {address} is not ready: {said[0][:500]}")]
    return [Finding("FAIL", f"what answers at {address} is no admin page of kproxy (status {status}).")]


async def _get(
    address: Address, path: str, context: ssl.SSLContext | None = None, name: str | None = None
) -> tuple[int, str]:
    """A GET by HTTP/1.0, which ends with the connection: the status, and the head with what follows it."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(
            *address, ssl=context, server_hostname=name, limit=MAX_ANSWER_BYTES
        )
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.read(MAX_ANSWER_BYTES)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    first = re.match(rb"HTTP/1\.[01] (\d{3})", head)
    if first is None:
        raise ConnectionError("it does not speak HTTP")
    return int(first[1]), (head + body).decode(errors="replace")
