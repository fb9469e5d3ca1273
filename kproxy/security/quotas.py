"""Compute how long quotas make a client wait after its use, as pure functions of a time in seconds.

A quota gives each principal that it applies to an account, which the principal's connections share. A rate is a leaky
bucket: it takes the use of one second at once, and a client that uses more waits until the excess has leaked. Of the
quotas with rates that fit a client, the most specific counts: one for a principal and client id, else for a principal,
else for a client id, else for everybody.

A process that is one of several has a share of each rate, which changes while clients use it. A client that waits
because of a shared account is checked again after its wait, as the rate may have changed.

Invariants
1. Over any time T a client that waits as required uses at most rate × (T + BURST_S), plus one request on each of its
   connections, and one on each connection that has waited for LONGEST_WAIT_S.
2. A change of a rate never adds to the amount that may be used at once. So 1 holds for all processes together while
   their shares are at most 1 in total, even if these change.
3. At most MOST_ACCOUNTS accounts are kept beside those of open connections; the least recently used are forgotten
   first. A client keeps its account as long as it has an open connection.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Mapping
from typing import Final
from weakref import WeakValueDictionary

from kproxy.config.quotas import QuotaSection
from kproxy.security.principals import EVERY_USER, USER, Principal

BURST_S: Final = 1.0
# The longest wait at a time; a client may have to wait again.
LONGEST_WAIT_S: Final = 30.0
MOST_ACCOUNTS: Final = 10_000
# The unit of shares: this many are one worker's equal part of a rate.
PARTS: Final = 1_000
DIGEST_BYTES: Final = 16
# The rates of an account; a rate's key ends with its place in this list.
_KINDS: Final = ("produced", "fetched", "requests")
# A process that uses this part of its share is about to need more.
_NEARLY_ALL: Final = 0.9
_MOST_PARTS: Final = 1_000_000_000
_LEAST_INTERVAL_S: Final = 0.01


class Bucket:
    """One rate, per second. `level` is the use that has not leaked, `used` the use since it was last set to 0."""

    __slots__ = ("_at", "level", "rate", "used", "usual")

    def __init__(self, rate: float) -> None:
        self.rate = self.usual = rate
        self._at = 0.0
        self.level = 0.0
        self.used = 0.0

    def use(self, amount: float, now: float) -> float:
        """Use this much; return the seconds to wait afterwards, by the usual rate while the present one is lower."""
        rate, level = self.rate, self.level
        # Every request of a busy client comes here: comparisons cost less than calls of `max`.
        if now > self._at:
            level -= (now - self._at) * rate
            if level < 0.0:
                level = 0.0
        self.level = level = level + amount
        self.used += amount
        self._at = now
        excess = level - rate * BURST_S
        return excess / max(rate, self.usual) if excess > 0.0 else 0.0

    def set_rate(self, rate: float, now: float) -> None:
        """Change the rate. The amount that may be used at once stays, but is at most one second of the new rate."""
        self.use(0.0, now)
        self.level = max(0.0, self.level + (rate - self.rate) * BURST_S)
        self.rate = rate


class Account:
    """The use of one client by rates per second, None if not limited. `is_shared`: the rates may change."""

    __slots__ = ("__weakref__", "fetched", "is_shared", "produced", "requests")

    def __init__(self, produced: float | None, fetched: float | None, requests: float | None) -> None:
        self.produced = None if produced is None else Bucket(produced)
        self.fetched = None if fetched is None else Bucket(fetched)
        self.requests = None if requests is None else Bucket(requests)
        self.is_shared = False

    def use(self, now: float, *, produced: int, fetched: int) -> float:
        """Use one request and these bytes; return the seconds to wait."""
        wait = self.requests.use(1.0, now) if self.requests is not None else 0.0
        if produced and self.produced is not None and (more := self.produced.use(produced, now)) > wait:
            wait = more
        if fetched and self.fetched is not None and (more := self.fetched.use(fetched, now)) > wait:
            wait = more
        return wait if wait < LONGEST_WAIT_S else LONGEST_WAIT_S

    def wait(self, now: float) -> float:
        """Return the seconds to wait before more is used."""
        wait = 0.0
        for bucket in (self.produced, self.fetched, self.requests):
            if bucket is not None:
                wait = max(wait, bucket.use(0.0, now))
        return min(wait, LONGEST_WAIT_S)

    def is_active(self, now: float) -> bool:
        """Whether there was use since `used` was set to 0, or there is use that has not leaked."""
        self.wait(now)
        return any(
            bucket is not None and (bucket.used > 0.0 or bucket.level > 0.0)
            for bucket in (self.produced, self.fetched, self.requests)
        )


class Accounts:
    """The accounts of this process, which survive a new reading of the file if their quota stays the same.

    Each process has `part` of every rate at first. With several processes (kproxy.workers.shares) `set_parts` sets
    others, in PARTS of that part, by the key of a rate: a digest of the quota and the principal, and the kind.
    """

    def __init__(self, part: float = 1.0) -> None:
        self.part = part
        self._accounts: dict[tuple[str, str], Account] = {}
        # These accounts, and forgotten ones that connections still use.
        self._by_digest: WeakValueDictionary[bytes, Account] = WeakValueDictionary()
        # Only the shares that are not PARTS; the supervisor bounds their number.
        self._parts: dict[bytes, int] = {}
        self._looked_at: float | None = None

    def find(self, quota: str, principal: str, rates: tuple[float | None, ...]) -> Account:
        """Return a principal's account by the text of its quota, which has these rates; open it if there is none."""
        key = (quota, principal)
        account = self._accounts.pop(key, None) or self._open(digest_of(*key), rates)
        self._accounts[key] = account
        if len(self._accounts) > MOST_ACCOUNTS:
            del self._accounts[next(iter(self._accounts))]
        return account

    def _open(self, digest: bytes, rates: tuple[float | None, ...]) -> Account:
        account = self._by_digest.get(digest)
        if account is not None:
            return account
        account = self._by_digest[digest] = Account(*(None if rate is None else rate * self.part for rate in rates))
        for kind in range(len(_KINDS)):
            parts = self._parts.get(digest + bytes((kind,)))
            if parts is not None:
                _set_parts(account, kind, parts, 0.0)
        return account

    def set_parts(self, parts: Mapping[bytes, int], now: float) -> None:
        """Change this process's share of rates, by their keys."""
        for key, of_key in parts.items():
            if of_key == PARTS:
                self._parts.pop(key, None)
            else:
                self._parts[key] = of_key
            account = self._by_digest.get(key[:-1])
            if account is not None:
                _set_parts(account, key[-1], of_key, now)

    def uses(self, now: float, most: int) -> list[tuple[bytes, int, bool]]:
        """Return the use since the last call by the keys of rates, of the `most` most active rates.

        A use is in PARTS of this process's first part of the rate, with a flag that its share does not suffice.
        """
        passed = 1.0 if self._looked_at is None else max(_LEAST_INTERVAL_S, now - self._looked_at)
        self._looked_at = now
        found: list[tuple[bytes, int, bool]] = []
        for digest, account in list(self._by_digest.items()):
            if not account.is_active(now):
                continue
            for kind, name in enumerate(_KINDS):
                bucket: Bucket | None = getattr(account, name)
                if bucket is None or not (bucket.used or bucket.level):
                    continue
                used, bucket.used = bucket.used, 0.0
                is_short = bucket.level > bucket.rate * BURST_S or used >= _NEARLY_ALL * bucket.rate * passed
                parts = min(round(PARTS * used / (bucket.usual * passed)), _MOST_PARTS)
                found.append((digest + bytes((kind,)), parts, is_short))
        if len(found) > most:
            return heapq.nlargest(most, found, key=lambda use: (use[2], use[1]))
        return found


def digest_of(*names: str) -> bytes:
    """Return a short key, by which workers name a quota or client to each other."""
    return hashlib.blake2b(repr(names).encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()


def _set_parts(account: Account, kind: int, parts: int, now: float) -> None:
    bucket: Bucket | None = getattr(account, _KINDS[kind])
    if bucket is not None:
        bucket.set_rate(bucket.usual * parts / PARTS, now)
        account.is_shared = True


class Quotas:
    """The quotas from one reading of the file, with the `accounts` of this process."""

    def __init__(self, quotas: Iterable[QuotaSection], accounts: Accounts | None = None) -> None:
        self._quotas = tuple(quotas)
        self._rates = [(each.produce_bytes_per_s, each.fetch_bytes_per_s, each.requests_per_s) for each in self._quotas]
        # These are texts, because strings cache their hash.
        self._texts = [
            repr((each.principal, each.client_id, rates)) for each, rates in zip(self._quotas, self._rates, strict=True)
        ]
        self._accounts = accounts or Accounts()

    def names_clients(self, principal: Principal) -> bool:
        """Whether the client id matters for a principal."""
        return any(quota.client_id is not None for quota in self._fitting(principal))

    def limits(self, principal: Principal) -> bool:
        """Whether a rate of a principal is limited, for some client id."""
        return any(quota.has_rates for quota in self._fitting(principal))

    def connections(self, principal: Principal) -> int | None:
        """Return the greatest number of connections of a principal; None if it is unlimited."""
        found = [quota for quota in self._fitting(principal) if quota.connections is not None]
        return min(found, key=lambda quota: quota.principal == EVERY_USER).connections if found else None

    def account(self, principal: Principal, client_id: str) -> Account | None:
        """Return the account of a client; None if no quota limits the client."""
        fitting = [
            (quota.principal == EVERY_USER, quota.client_id is None, place)
            for place, quota in enumerate(self._quotas)
            if self._fits(quota, principal) and quota.client_id in (None, client_id) and quota.has_rates
        ]
        if not fitting:
            return None
        place = min(fitting)[2]
        return self._accounts.find(self._texts[place], principal.name, self._rates[place])

    def _fitting(self, principal: Principal) -> list[QuotaSection]:
        return [quota for quota in self._quotas if self._fits(quota, principal)]

    def _fits(self, quota: QuotaSection, principal: Principal) -> bool:
        return quota.principal in (EVERY_USER, USER + principal.name)
