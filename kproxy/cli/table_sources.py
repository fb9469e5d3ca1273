"""Read the table of owners from a proxy's admin page or from etcd, for `kproxy table`.

Each source yields a table at once, and then one every WATCH_INTERVAL_S.

`ask` queries an admin page, for all commands.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlencode

import click
import msgspec

from kproxy.cli.options import AdminPlace
from kproxy.config import DEFAULT_ADMIN
from kproxy.config.admin import SPEAKS_TLS, read_token
from kproxy.config.etcd import EtcdOptions
from kproxy.errors import StartupError
from kproxy.observe.table import (
    ClaimsPage,
    ProxyRow,
    ReplicationPage,
    TablePage,
    TableView,
    merge_pages,
    table_page,
    with_replicas,
)
from kproxy.security.tls_errors import DialWords, broker_failure

if TYPE_CHECKING:
    from kproxy.ownership.leases import LeaseTable

ANSWER_TIMEOUT_S = 5.0
_WORDS = DialWords(
    "this command's",
    "--admin-ca",
    "--admin-cert and --admin-key",
    "name the page by a name of its certificate, or give --admin-server-name",
    "give --admin H:P without https://",
)
MAX_ANSWER_BYTES = 64 << 20
# The variables with the token of the admin page; no flag has it, as all users of the machine can read command lines.
TOKEN_VARIABLE = "KPROXY_ADMIN_TOKEN"  # noqa: S105 -- its name
TOKEN_FILE_VARIABLE = "KPROXY_ADMIN_TOKEN_FILE"  # noqa: S105 -- its name


# The most readings of a table, or of claims, that a change between two of their pages ends.
CONSISTENT_READS = 5
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Page = TypeVar("_Page", TablePage, ClaimsPage)


class NoAnswer(StartupError):
    """There is no usable answer; the message states the reason and the remedy."""


def ask(
    place: AdminPlace, path: str, query: Mapping[str, str | None] | None = None, *, order: bytes | None = None
) -> tuple[int, bytes]:
    """GET a page, or POST the JSON `order` to it; return status and body.

    Raises NoAnswer; blocks.
    """
    asked = urlencode({name: value for name, value in (query or {}).items() if value is not None})
    connection = http.client.HTTPConnection(*place.address, timeout=ANSWER_TIMEOUT_S)
    try:
        if place.context is not None:
            connection.sock = place.context.wrap_socket(
                socket.create_connection(place.address, ANSWER_TIMEOUT_S), server_hostname=place.server_name
            )
        target = f"{path}?{asked}" if asked else path
        headers = _authorization()
        if order is None:
            connection.request("GET", target, headers=headers)
        else:
            connection.request("POST", target, order, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        if answer.status in (401, 403):
            reason = answer.read(1_000).decode(errors="replace").strip()
            remedy = f": name the file with its token in {TOKEN_FILE_VARIABLE}" if answer.status == 401 else ""
            if headers and answer.status == 401:
                source = TOKEN_FILE_VARIABLE if os.environ.get(TOKEN_FILE_VARIABLE) else TOKEN_VARIABLE
                reason = f"the token of {source} is not the page's"
                remedy = ": give the one of its admin.token_file"
            raise NoAnswer(f"the admin page at {place} refuses the request ({reason}){remedy}.")
        body = answer.read(MAX_ANSWER_BYTES)
        if answer.status == 400 and body.decode(errors="replace").strip() == SPEAKS_TLS:
            raise NoAnswer(f"the admin page at {place} speaks TLS: give --admin https://{place}.")
        return answer.status, body
    except (OSError, http.client.HTTPException) as error:
        if place.tls is not None and isinstance(error, ssl.SSLError):
            has_ca, has_cert = place.tls.ca is not None, place.tls.cert is not None
            name = place.server_name or place.address.host
            failure = broker_failure(error, name=name, has_ca=has_ca, has_cert=has_cert, words=_WORDS)
            raise NoAnswer(f"the admin page at {place} cannot be queried: {failure.text}.") from error
        raise NoAnswer(
            f"no admin page answers at {place} ({_reason(error)}): start `kproxy dev`, or "
            f"`kproxy serve` with --admin {DEFAULT_ADMIN}; name a page with --admin H:P, or ask etcd with --etcd URL."
        ) from error
    finally:
        connection.close()


def _authorization() -> dict[str, str]:
    """Return the admin page's token, from a variable or the file that a variable names. Raises StartupError."""
    token, file = os.environ.get(TOKEN_VARIABLE, ""), os.environ.get(TOKEN_FILE_VARIABLE)
    if file:
        token = read_token(Path(file), TOKEN_FILE_VARIABLE)
    return {"Authorization": f"Bearer {token}"} if token else {}


def not_ours(place: AdminPlace, what: object) -> NoAnswer:
    """Make the error for a server that is not kproxy; `what` describes its answer."""
    return NoAnswer(f"the server at {place} is not an admin page of kproxy ({what}): give another --admin.")


def decoded(place: AdminPlace, answer: tuple[int, bytes], kind: type[_Struct]) -> _Struct:
    """Return the JSON of an answer of `ask`. Raises NoAnswer."""
    status, body = answer
    if status != 200:
        raise not_ours(place, f"status {status}")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise not_ours(place, error) from error


def consistent(read: Callable[[str | None], _Page]) -> list[_Page]:
    """Return all pages, of one revision if they do not change too often; `read` returns the page after a place."""
    pages: list[_Page] = []
    for _ in range(CONSISTENT_READS):
        pages = [read(None)]
        while pages[-1].next is not None:
            pages.append(read(pages[-1].next))
        if len({page.revision for page in pages}) == 1:
            break
    return pages


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


WATCH_INTERVAL_S = 1.0


class ReplicasUnknown(Exception):
    """A proxy cannot answer at the moment; the message states the reason."""


_Answer = TypeVar("_Answer")


async def answers(asked: AsyncIterable[_Answer | NoAnswer]) -> AsyncIterator[_Answer]:
    """Yield the answers, and print each new problem once. Raises NoAnswer if there is no answer at first."""
    started, problem = False, ""
    async for each in asked:
        if not isinstance(each, NoAnswer):
            started, problem = True, ""
            yield each
        elif not started:
            raise each
        elif str(each) != problem:
            problem = str(each)
            click.echo(f"kproxy: {problem}", err=True)


async def tables_from_admin(place: AdminPlace, topic: str | None) -> AsyncGenerator[TablePage | NoAnswer]:
    """Yield tables from a proxy's admin page."""
    while True:
        try:
            yield await asyncio.to_thread(_ask, place, topic)
        except NoAnswer as problem:
            yield problem
        await asyncio.sleep(WATCH_INTERVAL_S)


def _ask(place: AdminPlace, topic: str | None) -> TablePage:
    """Return the whole table, of one revision if it does not change too often."""

    def read(after: str | None) -> TablePage:
        return decoded(place, ask(place, "/table", {"topic": topic, "after": after}), TablePage)

    table = merge_pages(consistent(read))
    try:
        replicas = ask_replication(place, topic)
    except ReplicasUnknown:
        # The table itself shows that etcd does not answer.
        return table
    return with_replicas(table, [row for page in replicas for row in page.partitions])


def ask_replication(place: AdminPlace, topic: str | None = None) -> list[ReplicationPage]:
    """Return all pages of replicas, or no page if there are no replicas.

    Raises ReplicasUnknown, NoAnswer; blocks.
    """
    pages: list[ReplicationPage] = []
    while not pages or pages[-1].next is not None:
        status, body = ask(place, "/replication", {"topic": topic, "after": pages[-1].next if pages else None})
        if status == 503:
            raise ReplicasUnknown(body.decode(errors="replace").strip())
        if status == 501:
            # The proxy has no reference brokers.
            return []
        pages.append(decoded(place, (status, body), ReplicationPage))
    return pages


async def tables_from_etcd(
    endpoints: Sequence[str], options: EtcdOptions, prefix: str, topic: str | None
) -> AsyncGenerator[TablePage | NoAnswer]:
    """Yield tables from etcd, kept current by a watch."""
    from kproxy.etcd import EtcdClient, EtcdError
    from kproxy.fleet.view import named_in
    from kproxy.ownership.leases import LeaseTable
    from kproxy.ownership.replication import read_replication
    from kproxy.routing.topology import Topology

    client, topology = EtcdClient(endpoints, options), Topology()
    table = LeaseTable(client, prefix, topology)
    mirror: asyncio.Task[None] | None = None
    try:
        await client.connect()
        mirror = asyncio.create_task(table.run())
        if not await _loaded(table, mirror):
            yield NoAnswer(f"etcd at {client.endpoints} answers, but its leases could not be read: try again.")
            return
        while not mirror.done():
            proxies = [ProxyRow(*proxy) for proxy in await named_in(client, prefix)]
            whole = _whole(TableView(topology, table.age_s, table.stale, proxies=proxies), topic)
            if not table.stale:
                # Without permission, or without an answer, the table lacks replicas.
                with suppress(EtcdError):
                    whole = with_replicas(whole, (await read_replication(client, prefix)).rows)
            yield whole
            await asyncio.wait((mirror,), timeout=WATCH_INTERVAL_S)
        mirror.result()
    except EtcdError as error:
        yield NoAnswer(str(error))
    finally:
        if mirror is not None:
            mirror.cancel()
            await asyncio.gather(mirror, return_exceptions=True)
        await client.close()


async def _loaded(table: LeaseTable, mirror: asyncio.Task[None]) -> bool:
    """Wait until the table is loaded, however large it is; False if etcd stops answering."""
    synced = asyncio.create_task(table.wait_synced())
    try:
        while not synced.done():
            await asyncio.wait((synced, mirror), timeout=ANSWER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if mirror.done():
                mirror.result()
            if not synced.done() and table.last_error is not None:
                return False
        return True
    finally:
        synced.cancel()


def _whole(view: TableView, topic: str | None) -> TablePage:
    pages = [table_page(view, topic=topic)]
    while pages[-1].next is not None:
        pages.append(table_page(view, topic=topic, after=pages[-1].next))
    return merge_pages(pages)
