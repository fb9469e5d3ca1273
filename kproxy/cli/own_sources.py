"""Read claims and follow their changes, from a proxy or from etcd, for `kproxy own`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from kproxy.cli.options import AdminPlace, EtcdPlace, etcd_client
from kproxy.cli.table_sources import WATCH_INTERVAL_S, NoAnswer, ask, consistent, decoded
from kproxy.config.etcd import EtcdOptions
from kproxy.observe.table import ClaimRow, ClaimsPage, FreeOrder, FreeOutcome, merge_claims
from kproxy_codec.own import WHOLE_GROUP

if TYPE_CHECKING:
    from kproxy.claims.keys import OwnKeys

Kind = Literal["is owned", "claimed", "raised", "reset", "taken over", "freed"]


class Change(msgspec.Struct, frozen=True):
    """One change. `claim` is the current claim, or the freed one.

    `before` is the claim that `claim` replaces, if any.

    If a claim of the whole group has taken a resource over, `claim` is that claim.
    """

    change: Kind
    claim: ClaimRow
    before: ClaimRow | None = None


def change_by_put(claim: ClaimRow, before: ClaimRow | None, whole: ClaimRow | None) -> Change:
    """Return the change from `before` to `claim`.

    `whole` is the claim of the whole group, if any.
    """
    if before is not None and before.owner == claim.owner:
        return Change("raised" if claim.generation > before.generation else "reset", claim, before)
    lost = before or (whole if claim.resource != WHOLE_GROUP else None)
    if lost is None or lost.owner == claim.owner:
        return Change("claimed", claim)
    return Change("taken over", claim, lost)


def change_by_end(claim: ClaimRow, whole: ClaimRow | None) -> Change:
    """Return the change when `claim` is gone.

    `whole` is the claim of the whole group, if any.
    """
    if claim.resource != WHOLE_GROUP and whole is not None and whole.owner != claim.owner and whole.fence > claim.fence:
        return Change("taken over", whole, claim)
    return Change("freed", claim)


def changes_between(before: Iterable[ClaimRow], after: Iterable[ClaimRow]) -> list[Change]:
    """Return the changes between two states, first the ends, then the new claims by fence."""
    was, now = {claim.place: claim for claim in before}, {claim.place: claim for claim in after}
    ends = [
        change_by_end(claim, now.get((claim.group, WHOLE_GROUP))) for place, claim in was.items() if place not in now
    ]
    put = [claim for place, claim in now.items() if place not in was or was[place].fence != claim.fence]
    return ends + [
        change_by_put(claim, was.get(claim.place), was.get((claim.group, WHOLE_GROUP)))
        for claim in sorted(put, key=lambda claim: claim.fence)
    ]


Told = ClaimsPage | Change | NoAnswer
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def _news(before: ClaimsPage | None, page: ClaimsPage) -> Sequence[Told]:
    return [page] if before is None else changes_between(before.claims, page.claims)


class AdminClaims:
    """Claims from a proxy's admin page. The methods raise NoAnswer if it does not answer."""

    def __init__(self, place: AdminPlace) -> None:
        self._place = place

    async def page(self, group: str | None) -> ClaimsPage:
        """Return all claims, of one group if named."""
        return await asyncio.to_thread(self._read, group)

    async def free(self, order: FreeOrder) -> FreeOutcome:
        return await asyncio.to_thread(self._ask, FreeOutcome, "/own/free", order=msgspec.json.encode(order))

    async def follow(self, group: str | None) -> AsyncGenerator[Told]:
        """Yield all claims, and then each change, without end; changes within WATCH_INTERVAL_S appear as one."""
        before: ClaimsPage | None = None
        while True:
            try:
                page = await asyncio.to_thread(self._read, group)
            except NoAnswer as problem:
                yield problem
            else:
                for each in _news(before, page):
                    yield each
                before = page
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _read(self, group: str | None) -> ClaimsPage:
        """Return all claims, of one revision if they do not change too often."""
        return merge_claims(consistent(lambda after: self._ask(ClaimsPage, "/own", {"group": group, "after": after})))

    def _ask(
        self, kind: type[_Struct], path: str, query: dict[str, str | None] | None = None, *, order: bytes | None = None
    ) -> _Struct:
        status, body = ask(self._place, path, query, order=order)
        text = body[:500].decode(errors="replace").strip()
        if status in (400, 501, 503) and text:
            raise NoAnswer(f"the proxy with the admin page {self._place} says: {text}.")
        return decoded(self._place, (status, body), kind)


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
        """Compare the watched table with its last state, so that changes within WATCH_INTERVAL_S appear as one."""
        from kproxy.claims.admin import whole_page
        from kproxy.claims.table import OwnTable
        from kproxy.etcd import PrefixMirror

        before: ClaimsPage | None = None
        async with etcd_client(self._place) as client:
            table = OwnTable(self._keys)
            mirror = PrefixMirror(client, [self._keys.all], table)
            running = asyncio.create_task(mirror.run())
            try:
                while not running.done():
                    if mirror.last_error is not None:
                        yield NoAnswer(str(mirror.last_error))
                    elif table.synced and (before is None or table.revision != before.revision):
                        page = whole_page(table, group)
                        for each in _news(before, page):
                            yield each
                        before = page
                    await asyncio.wait((running,), timeout=WATCH_INTERVAL_S)
                running.result()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


Claims = AdminClaims | EtcdClaims
"""A source of claims."""
