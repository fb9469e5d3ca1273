"""Who owns what by the Own API, as a person or a program reads it: pages of plain structures, ready for JSON.

A page is taken in one step and so consistent at its own `revision`; who reads several pages compares their revisions.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

# Names are 1 KiB at most, six times that where JSON escapes them: a page stays below 16 MiB whatever they are.
MAX_CLAIM_ROWS = 1_000
# Of a client's name, in characters.
MAX_CLIENT_TEXT = 256
# A worker takes questions of 64 KiB.
MAX_ORDER_BYTES = 32 << 10
# Of topics with a writer group.
MAX_WRITER_GROUPS = 100
WHOLE_GROUP_TEXT = "(whole group)"


class NotOffered(Exception):
    """There are no claims here; the text says why."""


class ClaimRow(msgspec.Struct, frozen=True):
    """One claim that is in force. `resource` is empty for the whole group, as in Own's answers.

    `proxy` is the process that claimed, by its lease in etcd, and `address` what it advertises, empty where its entry
    is gone; `connection` a number within it, `client` what the client calls itself. `since`: in ms since 1970.
    """

    group: str
    resource: str
    generation: int
    fence: int
    proxy: str
    address: str
    connection: int
    client: str
    since: int

    @property
    def place(self) -> tuple[str, str]:
        return self.group, self.resource

    @property
    def owner(self) -> tuple[str, int]:
        return self.proxy, self.connection


class MemberRow(msgspec.Struct, frozen=True):
    """A process that can own for its clients: `seen` is the revision up to which it has acted upon every claim.

    `unsettled`: of so many partitions earlier writers' records may still be under way through it.
    """

    proxy: str
    address: str
    seen: int
    unsettled: int


class ClaimsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Claims by group and resource; `next` is the `after` of the next page, None on the last.

    `writer_groups`: the first of those that any member was told of, each as `TOPIC=GROUP`; `differ`: not all of them
    were told the same.
    """

    revision: int
    members: list[MemberRow] = []
    writer_groups: list[str] = []
    differ: bool = False
    claims: list[ClaimRow]
    next: str | None = None


class ClaimsQuery(msgspec.Struct, frozen=True):
    """Which page is wanted: claims, of one group if named, after `after` (`next` of the page before), so many."""

    group: str | None = None
    after: str | None = None
    limit: int = MAX_CLAIM_ROWS


class FreeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be free; `resources` None: all that is owned in the group."""

    group: str
    resources: list[str] | None = None


class FreeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    `freed` had owners, whose connections are severed; nobody owned `missing` by itself, but perhaps with the `whole`
    group; `changed` got another owner at that moment. `more`: there is more than one order frees.
    """

    freed: list[ClaimRow] = []
    missing: list[str] = []
    changed: list[str] = []
    whole: ClaimRow | None = None
    more: bool = False


def merge_claims(pages: Sequence[ClaimsPage]) -> ClaimsPage:
    """Consecutive pages as one."""
    return msgspec.structs.replace(pages[-1], claims=[claim for page in pages for claim in page.claims], next=None)
