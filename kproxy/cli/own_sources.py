"""Sources of `kproxy own`: claims and their changes, from a proxy or etcd."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import msgspec

from kproxy.cli.options import AdminPlace, EtcdPlace, etcd_client
from kproxy.cli.table_sources import WATCH_INTERVAL_S, NoAnswer, Unanswered, ask, not_ours
from kproxy.config.etcd import EtcdOptions
from kproxy.errors import StartupError
from kproxy.observe.table import ClaimRow, ClaimsPage, FreeOrder, FreeOutcome, merge_claims
from kproxy_codec.own import WHOLE_GROUP

if TYPE_CHECKING:
    from kproxy.claims.keys import OwnKeys
    from kproxy.claims.table import Member, TableRow
    from kproxy.etcd import Snapshot, WatchEvent

Kind = Literal["is owned", "claimed", "raised", "reset", "taken over", "freed"]


class Change(msgspec.Struct, frozen=True):
    """One change. `claim` is the present claim, or the freed one.

    `before` is the claim lost by it.

    If a resource was lost to a claim of the whole group, `claim` is that.
    """

    change: Kind
    claim: ClaimRow
    before: ClaimRow | None = None


def change_by_put(claim: ClaimRow, before: ClaimRow | None, whole: ClaimRow | None) -> Change:
    """The change from `before` to `claim`.

    `whole` is the claim of the whole group, if any.
    """
    if before is not None and before.owner == claim.owner:
        return Change("raised" if claim.generation > before.generation else "reset", claim, before)
    lost = before or (whole if claim.resource != WHOLE_GROUP else None)
    if lost is None or lost.owner == claim.owner:
        return Change("claimed", claim)
    return Change("taken over", claim, lost)


def change_by_end(claim: ClaimRow, whole: ClaimRow | None) -> Change:
    """The change when `claim` is gone.

    `whole` is the claim of the whole group, if any.
    """
    if claim.resource != WHOLE_GROUP and whole is not None and whole.owner != claim.owner and whole.fence > claim.fence:
        return Change("taken over", whole, claim)
    return Change("freed", claim)


def changes_between(before: Iterable[ClaimRow], after: Iterable[ClaimRow]) -> list[Change]:
    """The changes between two states: first ends, then new claims by fence."""
    was, now = {claim.place: claim for claim in before}, {claim.place: claim for claim in after}
    ends = [
        change_by_end(claim, now.get((claim.group, WHOLE_GROUP))) for place, claim in was.items() if place not in now
    ]
    put = [claim for place, claim in now.items() if place not in was or was[place].fence != claim.fence]
    return ends + [
        change_by_put(claim, was.get(claim.place), was.get((claim.group, WHOLE_GROUP)))
        for claim in sorted(put, key=lambda claim: claim.fence)
    ]


# Reads of claims that change between two of their pages.
CONSISTENT_READS = 5
# Addresses of processes that are gone, kept to name the owner of a lost claim.
MAX_KNOWN_ADDRESSES = 10_000

Told = ClaimsPage | Change | Unanswered
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Asked = TypeVar("_Asked")


class Claims(Protocol):
    """One source. Raises StartupError if it does not answer."""

    async def page(self, group: str | None) -> ClaimsPage:
        """All claims, of one group if named."""
        ...

    async def free(self, order: FreeOrder) -> FreeOutcome:
        """Free the claims in the order."""
        ...

    def follow(self, group: str | None) -> AsyncGenerator[Told]:
        """Yield all claims, and then each change, for ever."""
        ...


class AdminClaims:
    """Claims from a proxy's admin page."""

    def __init__(self, place: AdminPlace) -> None:
        self._place = place

    async def page(self, group: str | None) -> ClaimsPage:
        return await asyncio.to_thread(_or_startup_error, self._read, group)

    async def free(self, order: FreeOrder) -> FreeOutcome:
        return await asyncio.to_thread(_or_startup_error, self._free, order)

    async def follow(self, group: str | None) -> AsyncGenerator[Told]:
        """Poll the page: changes within WATCH_INTERVAL_S are seen as one."""
        before: ClaimsPage | None = None
        while True:
            try:
                page = await asyncio.to_thread(self._read, group)
            except NoAnswer as problem:
                yield Unanswered(str(problem))
            else:
                if before is None:
                    yield page
                else:
                    for change in changes_between(before.claims, page.claims):
                        yield change
                before = page
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _read(self, group: str | None) -> ClaimsPage:
        """All claims, of one revision if they stay still long enough."""
        pages: list[ClaimsPage] = []
        for _ in range(CONSISTENT_READS):
            pages = [self._ask(ClaimsPage, "/own", {"group": group})]
            while pages[-1].next is not None:
                pages.append(self._ask(ClaimsPage, "/own", {"group": group, "after": pages[-1].next}))
            if len({page.revision for page in pages}) == 1:
                break
        return merge_claims(pages)

    def _free(self, order: FreeOrder) -> FreeOutcome:
        return self._ask(FreeOutcome, "/own/free", order=msgspec.json.encode(order))

    def _ask(
        self, kind: type[_Struct], path: str, query: dict[str, str | None] | None = None, *, order: bytes | None = None
    ) -> _Struct:
        status, body = ask(self._place, path, query, order=order)
        text = body[:500].decode(errors="replace").strip()
        if status in (400, 501, 503) and text:
            raise NoAnswer(f"the proxy with the admin page {self._place} says: {text}.")
        if status != 200:
            raise not_ours(self._place, f"status {status}")
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise not_ours(self._place, error) from error


def _or_startup_error(ask_page: Callable[[_Asked], _Struct], asked: _Asked) -> _Struct:
    try:
        return ask_page(asked)
    except NoAnswer as problem:
        raise StartupError(str(problem)) from problem


class EtcdClaims:
    """Claims from etcd, under a prefix."""

    def __init__(self, endpoints: Sequence[str], options: EtcdOptions, prefix: str) -> None:
        from kproxy.claims.keys import OwnKeys

        self._place = EtcdPlace(tuple(endpoints), options, prefix)
        self._keys: OwnKeys = OwnKeys(prefix)

    async def page(self, group: str | None) -> ClaimsPage:
        from kproxy.claims.admin import read_table, whole_page

        async with etcd_client(self._place) as client:
            return whole_page(await read_table(client, self._keys), group)

    async def free(self, order: FreeOrder) -> FreeOutcome:
        from kproxy.claims.admin import free

        async with etcd_client(self._place) as client:
            return await free(client, self._keys, order)

    async def follow(self, group: str | None) -> AsyncGenerator[Told]:
        from kproxy.etcd import PrefixMirror

        async with etcd_client(self._place) as client:
            watched = _Watched(self._keys, group)
            mirror = PrefixMirror(client, [self._keys.all], watched)
            running = asyncio.create_task(mirror.run())
            try:
                while not running.done():
                    if mirror.last_error is not None:
                        yield Unanswered(str(mirror.last_error))
                    while watched.told:
                        yield watched.told.popleft()
                    watched.news.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(WATCH_INTERVAL_S):
                            await watched.news.wait()
                running.result()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


class _Watched:
    """Collects the mirror's changes in `told`, at most those of one iteration of the event loop."""

    def __init__(self, keys: OwnKeys, group: str | None) -> None:
        from kproxy.claims.table import OwnTable

        self.told: deque[ClaimsPage | Change] = deque()
        self.news = asyncio.Event()
        self._table = OwnTable(keys, listener=self)
        self._is_loaded = False
        self._group = group
        self._addresses: dict[str, str] = {}

    def on_restored(self) -> None:
        self._is_loaded = False
        self._table.on_restored()

    def on_snapshot(self, snapshot: Snapshot) -> None:
        from kproxy.claims.admin import addresses_of, whole_page

        self._table.on_snapshot(snapshot)
        if not self._is_loaded:
            self._is_loaded = True
            self._addresses = addresses_of(self._table)
            self.told.append(whole_page(self._table, self._group))
        self.news.set()

    def on_events(self, events: list[WatchEvent], revision: int) -> None:
        self._table.on_events(events, revision)
        self.news.set()

    # Calls of the table

    def claim_put(self, row: TableRow, before: TableRow | None) -> None:
        if self._is_told(row):
            whole = self._row_or_none(self._table.whole(row.group))
            self.told.append(change_by_put(self._row(row), self._row_or_none(before), whole))

    def claim_gone(self, row: TableRow, revision: int) -> None:
        if self._is_told(row):
            whole = self._row_or_none(self._table.whole(row.group))
            self.told.append(change_by_end(self._row(row), whole))

    def member_put(self, name: str, member: Member) -> None:
        from kproxy.claims.admin import address_of, addresses_of

        if len(self._addresses) >= MAX_KNOWN_ADDRESSES:
            self._addresses = addresses_of(self._table)
        self._addresses[name] = address_of(member)

    def member_gone(self, member: str, rows: Sequence[TableRow], revision: int) -> None:
        """Keep the address: a process's entry goes before its claims."""

    def batch_told(self) -> None:
        """Do nothing: each change has been told."""

    def restored(self) -> None:
        """Do nothing: a snapshot follows."""

    def _is_told(self, row: TableRow) -> bool:
        return self._is_loaded and self._group in (None, row.group)

    def _row(self, row: TableRow) -> ClaimRow:
        from kproxy.claims.admin import claim_row

        return claim_row(row, self._addresses)

    def _row_or_none(self, row: TableRow | None) -> ClaimRow | None:
        return None if row is None else self._row(row)
