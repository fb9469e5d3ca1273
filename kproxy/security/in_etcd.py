"""Keep a copy of the users and access rules in etcd, which apply to all proxies with one prefix once written.

    {prefix}/kproxy/users/{name}   {"credentials": ["SCRAM-SHA-256$ITERATIONS:SALT$STORED_KEY:SERVER_KEY", ...]}
    {prefix}/kproxy/acls/{id}      {"principal": "User:alice", "operations": ["write"], "topics": ["orders"]}

A user's credentials are those of the file of users; a rule has the keys of `[[acls]]`. A user's name is
percent-encoded. No key is on a lease. `kproxy user` and `kproxy acl` write the keys, proxies only read them.

States of a process's copy
  unread    no user or rule is known
  read      all users and rules of one revision are known, and all changes that etcd has sent since

Transitions
  unread -> read    a first snapshot has been read whole; `open` returns only then, so no client is let in before
  read   -> read    a change of a key; a later snapshot, which replaces everything

Invariants
1. In state read the copy stays as it is while etcd does not answer, however long.
2. An invalid value changes nothing: the last good value of its key stays, if this process has read one. The invalid
   value is counted, and logged once in one line with the key and the reason. Other keys are not affected.
3. At most MOST_USERS users and MOST_ACLS rules are kept, with values of at most MOST_USER_BYTES and MOST_ACL_BYTES. A
   new key beyond that counts as invalid.
4. No log line and no error has a part of a user's value.
5. A snapshot of any size is parsed SLICE entries at a time; other tasks run in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import quote, unquote

import msgspec
import structlog

from kproxy.config.access import MOST_ACLS, AclSection, parse_acl
from kproxy.config.etcd import EtcdOptions
from kproxy.errors import StartupError
from kproxy.etcd import EtcdClient, KeyValue, PrefixMirror, Snapshot, WatchEvent, connect
from kproxy.runtime.tasks import cancel, in_time
from kproxy.security.acls import Acl, acls_of
from kproxy.security.events import NO_EVENTS, SecurityEvents
from kproxy.security.users import MOST_USERS, Credentials, Users, check_name, parse_credentials

MOST_USER_BYTES: Final = 4 << 10
MOST_ACL_BYTES: Final = 16 << 10
SLICE: Final = 200
# A longer wait for etcd, in seconds, is reported, as an etcd that is up answers at once.
PATIENCE_S: Final = 5.0
# The most invalid values that are remembered, so that later snapshots do not report them again.
_MOST_REMEMBERED: Final = 1_000
# The most characters of a key in the log.
_MOST_SHOWN: Final = 1_000
_ACL_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_MADE_ID_DIGITS: Final = 12

log = structlog.get_logger(__name__)


class AccessKeys(NamedTuple):
    """Builds and parses the keys under `prefix`, the prefix of all keys in etcd."""

    prefix: str

    @property
    def users(self) -> str:
        """The prefix of the keys of users."""
        return f"{self.prefix.rstrip('/')}/kproxy/users/"

    @property
    def acls(self) -> str:
        """The prefix of the keys of rules."""
        return f"{self.prefix.rstrip('/')}/kproxy/acls/"

    def user(self, name: str) -> str:
        return self.users + quote(name, safe="")

    def acl(self, acl_id: str) -> str:
        return self.acls + acl_id


def parse_user_key(rest: str) -> str:
    """Return the name in a key, the part after the prefix. Raises ValueError."""
    name = check_name(unquote(rest, errors="strict"))
    if quote(name, safe="") != rest:
        raise ValueError("the key is not the percent-encoded name of a user")
    return name


def check_acl_id(acl_id: str) -> str:
    """Return the id of a rule. Raises ValueError for an invalid one."""
    if _ACL_ID.fullmatch(acl_id) is None:
        raise ValueError("a rule's id must have 1 to 100 ASCII letters, digits, '.', '_' and '-'")
    return acl_id


class _UserValue(msgspec.Struct, forbid_unknown_fields=True):
    credentials: list[str]


def encode_user(credentials: Credentials) -> bytes:
    return msgspec.json.encode(_UserValue([str(each) for each in credentials.values()]))


def decode_user(value: bytes) -> Credentials:
    """Parse a user's value. Raises ValueError, with no part of the value in the message."""
    _check_length(value, MOST_USER_BYTES)
    try:
        texts = msgspec.json.decode(value, type=_UserValue).credentials
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # The error is not chained, because its cause may show a part of the value.
        raise ValueError('a user\'s value must be JSON with one key, {"credentials": [...]}') from None
    return parse_credentials(texts)


def encode_acl(acl: AclSection) -> bytes:
    """Return a rule's value, with the same bytes for the same rule."""
    given = {key: value for key, value in msgspec.structs.asdict(acl).items() if value not in (None, False)}
    return msgspec.json.encode(given, order="deterministic")


def decode_acl(value: bytes) -> AclSection:
    """Parse a rule's value. Raises ValueError."""
    _check_length(value, MOST_ACL_BYTES)
    try:
        return parse_acl(msgspec.json.decode(value), "the rule")
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError("a rule's value must be JSON with the keys of [[acls]]") from error
    except StartupError as error:
        raise ValueError(str(error).rstrip(".")) from error


def make_acl_id(acl: AclSection) -> str:
    """Return an id for a rule that has none: the same for the same rule."""
    return hashlib.sha256(encode_acl(acl)).hexdigest()[:_MADE_ID_DIGITS]


def _check_length(value: bytes, most: int) -> None:
    if len(value) > most:
        raise ValueError(f"the value has {len(value)} bytes; at most {most} are allowed")


Value = TypeVar("Value")


class _Kept(Generic[Value]):
    """The good values of one kind, by name; `one` and `many` name the kind for people.

    `parse_key` and `parse` raise ValueError. `refused` is called with each invalid value and the reason.
    """

    def __init__(
        self,
        one: str,
        many: str,
        prefix: str,
        parse_key: Callable[[str], str],
        parse: Callable[[bytes], Value],
        most: int,
        refused: Callable[[_Kept[Value], KeyValue, str, bool], None],
    ) -> None:
        self.one, self.many, self.prefix = one, many, prefix
        self._parse_key, self._parse, self._most = parse_key, parse, most
        self.by_name: dict[str, Value] = {}
        # The revision in which each key was created.
        self.created: dict[str, int] = {}
        self._refused = refused

    def put(self, kv: KeyValue) -> bool:
        """Store a value; return whether it is valid."""
        return self._put(kv, self.by_name, self.created)

    def of(self, events: Iterable[WatchEvent]) -> dict[str, Value]:
        """Return the good values of these keys."""
        names = {unquote(event.kv.key.removeprefix(self.prefix)) for event in events}
        return {name: self.by_name[name] for name in names if name in self.by_name}

    def delete(self, key: str) -> bool:
        """Drop the value of a key; return whether there was one."""
        try:
            name = self._parse_key(key.removeprefix(self.prefix))
        except ValueError:
            # The key never had a value.
            return False
        self.created.pop(name, None)
        return self.by_name.pop(name, None) is not None

    async def replace(self, kvs: Iterable[KeyValue]) -> None:
        """Replace all values by those of a snapshot."""
        fresh: dict[str, Value] = {}
        created: dict[str, int] = {}
        for ordinal, kv in enumerate(kvs, 1):
            if kv.key.startswith(self.prefix):
                self._put(kv, fresh, created)
            if ordinal % SLICE == 0:
                await asyncio.sleep(0)
        self.by_name, self.created = fresh, created

    def _put(self, kv: KeyValue, values: dict[str, Value], created: dict[str, int]) -> bool:
        name, before = None, self.by_name
        try:
            name = self._parse_key(kv.key.removeprefix(self.prefix))
            value = self._parse(kv.value)
            if name not in values and len(values) >= self._most:
                raise ValueError(f"there are more than {self._most} {self.many}: remove some, and write it again")
        except ValueError as error:
            is_kept = name is not None and name in before and (name in values or len(values) < self._most)
            if name is not None and is_kept:
                values[name], created[name] = before[name], self.created[name]
            self._refused(self, kv, str(error), is_kept)
            return False
        values[name], created[name] = value, kv.create_revision
        return True


class AccessInEtcd:
    """This process's copy of the users (if `has_users`) and rules (if `has_acls`) in etcd.

    `on_acls` is called after each change of the rules. `tells`: this process, and not another worker, logs changes and
    invalid values.
    """

    def __init__(
        self,
        endpoints: tuple[str, ...],
        options: EtcdOptions,
        prefix: str,
        *,
        has_users: bool,
        has_acls: bool,
        counters: Counter[str],
        tells: bool = True,
        events: SecurityEvents = NO_EVENTS,
    ) -> None:
        keys = AccessKeys(prefix)
        self.has_users = has_users
        self.has_acls = has_acls
        self.on_acls: Callable[[], None] = lambda: None
        self._client = EtcdClient(endpoints, options)
        self._counters = counters
        self._tells = tells
        self._events = events if tells else NO_EVENTS
        refused, parse_acls = self._value_refused, lambda value: acls_of([decode_acl(value)])
        self._users = _Kept("user", "users", keys.users, parse_user_key, decode_user, MOST_USERS, refused)
        self._acls = _Kept("rule", "rules", keys.acls, check_acl_id, parse_acls, MOST_ACLS, refused)
        wanted = [*([keys.users] if has_users else []), *([keys.acls] if has_acls else [])]
        self._mirror = PrefixMirror(self._client, wanted, self)
        self.users = Users({})
        self._told: dict[str, int] = {}
        self._is_read = False

    @property
    def acls(self) -> list[Acl]:
        """All rules, in no order."""
        return [acl for acls in self._acls.by_name.values() for acl in acls]

    @contextlib.asynccontextmanager
    async def open(self, waits: Callable[[str], None]) -> AsyncIterator[asyncio.Task[None]]:
        """Read all users and rules once, however long that takes, and follow changes until closed.

        `waits` is called from time to time with the reason for waiting. Yields the task that follows the changes, which
        ends only with an error. Raises StartupError for an error of etcd that retrying does not fix.
        """
        client, mirror = self._client, self._mirror
        what = " and ".join((["users"] if self.has_users else []) + (["rules of access"] if self.has_acls else []))
        try:
            await connect(client, lambda error: waits(f"{error} The {what} are there: start etcd."))
            following = asyncio.create_task(mirror.run())
            try:
                while not await in_time(mirror.wait_synced(), following, PATIENCE_S):
                    why = mirror.last_error or "they have not come yet"
                    waits(f"etcd at {client.endpoints} answers, but the {what} could not be read ({why}).")
                yield following
            finally:
                await cancel(following)
        finally:
            await client.close()

    # Calls of the mirror

    def on_restored(self) -> None:
        """Forget the earlier revisions, which are void; the snapshot that follows has everything."""
        self._told.clear()

    async def on_snapshot(self, snapshot: Snapshot) -> None:
        before = [(kept, kept.by_name) for kept in self._kinds()]
        if self.has_users:
            await self._users.replace(snapshot.kvs)
            self._take_users()
        if self.has_acls:
            await self._acls.replace(snapshot.kvs)
            self.on_acls()
        if self._is_read:
            self._changed("users and rules" if self.has_users and self.has_acls else self._kinds()[0].many)
            for kept, values in before:
                await asyncio.to_thread(self._tell_changes, kept, values, kept.by_name)
        self._is_read = True

    def on_events(self, events: list[WatchEvent], revision: int) -> None:
        for kept in self._kinds():
            ours = [event for event in events if event.kv.key.startswith(kept.prefix)]
            before = kept.of(ours)
            changes = [kept.delete(event.kv.key) if event.deleted else kept.put(event.kv) for event in ours]
            if any(changes):
                if kept is self._users:
                    self._take_users()
                else:
                    self.on_acls()
                self._changed(kept.many)
                self._tell_changes(kept, before, kept.of(ours))

    def _kinds(self) -> list[_Kept[Credentials] | _Kept[list[Acl]]]:
        return [*([self._users] if self.has_users else []), *([self._acls] if self.has_acls else [])]

    def _take_users(self) -> None:
        self.users = Users(self._users.by_name, self._users.created)

    def _changed(self, what: str) -> None:
        self._counters["tls.reloads.done"] += 1
        if self._tells:
            log.info("reloaded", what=f"{what} in etcd")

    def _tell_changes(self, kept: _Kept[Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        if kept is self._acls:
            before, after = (
                {f"{acl_id}: {acl}": acl for acl_id, acls in values.items() for acl in acls}
                for values in (before, after)
            )
        self._events.tell_changes(f"{kept.many} in etcd", before, after)

    def _value_refused(self, kept: _Kept[Value], kv: KeyValue, reason: str, is_kept: bool) -> None:
        key = kv.key[:_MOST_SHOWN]
        if self._told.get(key) == kv.mod_revision:
            return
        if len(self._told) >= _MOST_REMEMBERED:
            self._told.clear()
        self._told[key] = kv.mod_revision
        self._counters["tls.reloads.failed"] += 1
        if self._tells:
            log.error(
                "reload failed",
                consequence="its last good value stays" if is_kept else f"the {kept.one} is ignored",
                what=f"a {kept.one} in etcd",
                key=key,
                reason=reason,
            )
        self._events.tell("not_reloaded", what=f"{kept.one} in etcd: {key}", reason=reason)
