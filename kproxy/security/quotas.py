"""Quotas: compute how long a client must wait after its use. Pure; the time is an argument, in seconds.

Each principal, or client id, that a quota applies to has an account of its own, which its connections share. A rate is
a leaky bucket: it takes the use of one second at once, and a client that uses more waits until the excess has leaked.
The first quota of the list that names a client counts: by principal and client id, by principal, by client id, for
everybody, in this order.

The compiled plain path (kproxy.plain) has twins of `Bucket` and `Account`, which are used instead where it is built.

Invariants
1. Over any time T a client that waits as required uses at most rate × (T + BURST_S), and one request more.
2. At most MOST_ACCOUNTS accounts are kept; the least recently used are forgotten first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kproxy.config.quotas import QuotaSection
from kproxy.plain import compiled
from kproxy.security.principals import USER, Principal

BURST_S: Final = 1.0
# The longest wait at a time; a client may have to wait again.
LONGEST_WAIT_S: Final = 30.0
MOST_ACCOUNTS: Final = 10_000
_EVERY_USER: Final = "User:*"


class _Bucket:
    """One rate, per second; `level` is the used amount that has not leaked."""

    __slots__ = ("_at", "level", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._at = 0.0
        self.level = 0.0

    def use(self, amount: float, now: float) -> float:
        """Use this much; return the seconds to wait afterwards."""
        leaked = max(0.0, now - self._at) * self.rate
        self.level = max(0.0, self.level - leaked) + amount
        self._at = now
        return max(0.0, self.level / self.rate - BURST_S)


class _Account:
    """The use of one client, by rates per second; None: not limited."""

    __slots__ = ("fetched", "produced", "requests")

    def __init__(self, produced: float | None, fetched: float | None, requests: float | None) -> None:
        self.produced = None if produced is None else _Bucket(produced)
        self.fetched = None if fetched is None else _Bucket(fetched)
        self.requests = None if requests is None else _Bucket(requests)

    def use(self, now: float, *, produced: int, fetched: int) -> float:
        """Use one request and these bytes; return the seconds to wait."""
        wait = self.requests.use(1, now) if self.requests is not None else 0.0
        if self.produced is not None and produced:
            wait = max(wait, self.produced.use(produced, now))
        if self.fetched is not None and fetched:
            wait = max(wait, self.fetched.use(fetched, now))
        return min(wait, LONGEST_WAIT_S)


if TYPE_CHECKING:
    Account = _Account
    Bucket = _Bucket
else:
    Account = compiled.Account if compiled is not None else _Account
    Bucket = compiled.Bucket if compiled is not None else _Bucket


class Quotas:
    """The quotas of one reading of the file; this process has the part `share` of each rate."""

    def __init__(self, quotas: Iterable[QuotaSection], share: float = 1.0) -> None:
        self._quotas = tuple(quotas)
        self._share = share
        self._accounts: dict[tuple[int, str, str | None], Account] = {}

    def names_clients(self, principal: Principal) -> bool:
        """Whether the client id matters for a principal."""
        return any(quota.client_id is not None for quota in self._fitting(principal))

    def limits(self, principal: Principal) -> bool:
        """Whether a rate of a principal is limited, for some client id."""
        return any(
            quota.produce_bytes_per_s or quota.fetch_bytes_per_s or quota.requests_per_s
            for quota in self._fitting(principal)
        )

    def connections(self, principal: Principal) -> int | None:
        """The most connections of a principal; None: any number."""
        found = [quota for quota in self._fitting(principal) if quota.connections is not None]
        return min(found, key=lambda quota: quota.principal == _EVERY_USER).connections if found else None

    def account(self, principal: Principal, client_id: str) -> Account | None:
        """The account of a client; None where nothing limits it."""
        fitting = [
            (quota.principal == _EVERY_USER, quota.client_id is None, place)
            for place, quota in enumerate(self._quotas)
            if self._fits(quota, principal) and quota.client_id in (None, client_id)
            if quota.produce_bytes_per_s or quota.fetch_bytes_per_s or quota.requests_per_s
        ]
        if not fitting:
            return None
        place = min(fitting)[2]
        key = (place, principal.name, self._quotas[place].client_id)
        account = self._accounts.pop(key, None) or self._open(self._quotas[place])
        self._accounts[key] = account
        if len(self._accounts) > MOST_ACCOUNTS:
            del self._accounts[next(iter(self._accounts))]
        return account

    def _open(self, quota: QuotaSection) -> Account:
        rates = (quota.produce_bytes_per_s, quota.fetch_bytes_per_s, quota.requests_per_s)
        return Account(*(None if rate is None else rate * self._share for rate in rates))

    def _fitting(self, principal: Principal) -> list[QuotaSection]:
        return [quota for quota in self._quotas if self._fits(quota, principal)]

    def _fits(self, quota: QuotaSection, principal: Principal) -> bool:
        return quota.principal in (_EVERY_USER, USER + principal.name)
