"""The claims of the Own API and orders to free them, for JSON.

A page is made in one step and so consistent at its own `revision`. A reader of several pages compares their revisions.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

# Names have at most 1 KiB, six times that if JSON escapes them: a page stays below 16 MiB.
MAX_CLAIM_ROWS = 1_000
# Of a client's id, in characters.
MAX_CLIENT_TEXT = 256
MAX_ORDER_BYTES = 32 << 10
# Of topics with a writer group.
MAX_WRITER_GROUPS = 100
WHOLE_GROUP_TEXT = "(whole group)"


class NotOffered(Exception):
    """The Own API is not offered here; the text says why."""


class ClaimRow(msgspec.Struct, frozen=True):
    """One claim in force.

    `resource` is empty for the whole group, as in Own's answers.

    `proxy` is the process that claimed, by its lease in etcd, and `address` its advertised address, empty if its entry
    is gone; `connection` is a number within it, `client` the client id. `since`: in ms since 1970.
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
    """A process that can own for its clients: `seen` is the revision up to which it has acted on every claim.

    `unsettled`: the number of partitions to which records of earlier writers may still be in flight through it.
    """

    proxy: str
    address: str
    seen: int
    unsettled: int


class ClaimsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Claims by group and resource.

    `next` is the `after` of the next page, None on the last.

    `writer_groups`: the first of those configured at any member, each as `TOPIC=GROUP`; `differ`: the members are not
    all configured alike.
    """

    revision: int
    members: list[MemberRow] = []
    writer_groups: list[str] = []
    differ: bool = False
    claims: list[ClaimRow]
    next: str | None = None


class ClaimsQuery(msgspec.Struct, frozen=True):
    """A page to ask for: at most `limit` claims after `after` (`next` of the page before), of one group if named."""

    group: str | None = None
    after: str | None = None
    limit: int = MAX_CLAIM_ROWS


class FreeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The claims to free; `resources` None: all claims in the group."""

    group: str
    resources: list[str] | None = None


class FreeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a FreeOrder.

    `freed` had owners, whose connections are severed. `missing` had no owner by itself, but perhaps one of the `whole`
    group. `changed` got another owner meanwhile. `more`: there are more claims than one order frees.
    """

    freed: list[ClaimRow] = []
    missing: list[str] = []
    changed: list[str] = []
    whole: ClaimRow | None = None
    more: bool = False


def merge_claims(pages: Sequence[ClaimsPage]) -> ClaimsPage:
    """Join consecutive pages."""
    return msgspec.structs.replace(pages[-1], claims=[claim for page in pages for claim in page.claims], next=None)
