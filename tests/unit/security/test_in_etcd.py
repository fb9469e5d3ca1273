"""Users and rules in etcd: their keys and values, and what stays in force when a value is invalid."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from structlog.testing import capture_logs

from kproxy.config.access import AclSection
from kproxy.config.etcd import EtcdOptions
from kproxy.etcd import KeyValue, Snapshot, WatchEvent
from kproxy.security import in_etcd
from kproxy.security.acls import Operation, Resource, Rules
from kproxy.security.events import SecurityEvents
from kproxy.security.in_etcd import (
    MOST_ACL_BYTES,
    AccessInEtcd,
    AccessKeys,
    check_acl_id,
    decode_acl,
    decode_user,
    encode_acl,
    encode_user,
    make_acl_id,
    parse_user_key,
)
from kproxy.security.principals import Principal
from tests.support.security import sasl_client as sasl

KEYS = AccessKeys("/kafscale")
ALICE = encode_user(sasl.credentials_of("alice"))
CREDENTIAL = str(next(iter(sasl.credentials_of("alice").values())))


@pytest.mark.parametrize("name", ["alice", "a/b", "a b", "ü", "100%", "*", ".."])
def test_name_is_one_key(name: str) -> None:
    rest = KEYS.user(name).removeprefix(KEYS.users)
    assert "/" not in rest
    assert parse_user_key(rest) == name


@pytest.mark.parametrize("rest", ["", "a/b", "%61", "a%2fb", "%ff", "a%0A", "a" * 300, "\udcff"])
def test_key_of_impossible_name_is_refused(rest: str) -> None:
    with pytest.raises(ValueError, match=r"user|decode"):
        parse_user_key(rest)


@pytest.mark.parametrize("value", [b"\xff", b'{"credentials": ["hunter2\xff"]}', b'{"hunter2\xff": []}'])
def test_error_for_non_text_value_hides_it(value: bytes) -> None:
    with pytest.raises(ValueError, match="a user's value must be JSON with one key") as raised:
        decode_user(value)
    assert "0xff" not in str(raised.value)


def test_values_are_read_as_they_are_written() -> None:
    assert decode_user(ALICE) == sasl.credentials_of("alice")
    rule = AclSection(principal="User:a", operations=["read"], topics=["t*"], cluster=True, effect="deny")
    assert decode_acl(encode_acl(rule)) == rule
    assert make_acl_id(rule) == make_acl_id(decode_acl(encode_acl(rule)))
    assert check_acl_id(make_acl_id(rule))
    # Another encoding of it would have another id.
    assert encode_acl(rule) == (
        b'{"cluster":true,"effect":"deny","operations":["read"],"principal":"User:a","topics":["t*"]}'
    )


def test_user_value_has_at_most_4_kib() -> None:
    assert decode_user(ALICE.ljust(4_096)) == sasl.credentials_of("alice")
    with pytest.raises(ValueError, match="at most 4096"):
        decode_user(ALICE.ljust(4_097))


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"SECRET",
        b"\xff\xfe",
        b'"SECRET"',
        b"[" * 3_000,
        b'{"credentials": []}',
        b'{"credentials": ["SECRET"]}',
        b'{"credentials": [1]}',
        b'{"SECRET": 1}',
        json.dumps({"credentials": [CREDENTIAL], "enabled": False}).encode(),
        json.dumps({"credentials": [CREDENTIAL, CREDENTIAL]}).encode(),
    ],
)
def test_invalid_user_is_refused_without_showing_it(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"^(a|the) ") as raised:
        decode_user(value)
    assert not re.search("SECRET|0xff", str(raised.value))


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (b"", "JSON"),
        (b"[" * 3_000, "JSON"),
        (b"[]", "expected `object`"),
        (b'{"principal": "User:a", "operations": ["read"]}', "no resource"),
        (b'{"principal": "a", "operations": ["read"], "cluster": true}', "principal"),
        (b'{"principal": "User:a", "operations": ["fly"], "cluster": true}', "fly"),
        (b'{"principal": "User:a", "operations": ["read"], "topic": ["t"]}', "did you mean topics"),
        (b" " * MOST_ACL_BYTES + b"{}", f"at most {MOST_ACL_BYTES}"),
    ],
)
def test_invalid_rule_is_refused_with_a_reason(value: bytes, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        decode_acl(value)


# A process's copy


class Copy:
    """A copy that gets the content of etcd from the test."""

    def __init__(self) -> None:
        self.counters = Counter[str]()
        self.revision = 0
        self.copy = AccessInEtcd(
            ("http://127.0.0.1:1",), EtcdOptions(), "/kafscale", has_users=True, has_acls=True, counters=self.counters
        )

    def put(self, key: str, value: bytes) -> None:
        self.copy.on_events([WatchEvent(False, self.kv(key, value))], self.revision)

    def delete(self, key: str) -> None:
        self.copy.on_events([WatchEvent(True, self.kv(key, b""))], self.revision)

    async def snapshot(self, **values: bytes) -> None:
        await self.take([self.kv(KEYS.users + name, value) for name, value in values.items()])

    async def take(self, kvs: list[KeyValue]) -> None:
        await self.copy.on_snapshot(Snapshot(self.revision, 1, kvs))

    def kv(self, key: str, value: bytes) -> KeyValue:
        self.revision += 1
        return KeyValue(key, value, 1, self.revision, 1, 0)

    @property
    def names(self) -> set[str]:
        return set(self.copy.users.by_name)

    @property
    def failed(self) -> int:
        return self.counters["tls.reloads.failed"]


def errors(logs: list[Any]) -> list[Any]:
    return [each for each in logs if each["log_level"] == "error"]


async def test_last_valid_value_of_a_key_stays() -> None:
    site = Copy()
    await site.snapshot(alice=ALICE, bob=b"SECRET")
    assert (site.names, site.failed) == ({"alice"}, 1)
    with capture_logs() as logs:
        site.put(KEYS.user("alice"), b"SECRET")
        site.put(KEYS.user("carol"), ALICE)
    assert (site.names, site.failed) == ({"alice", "carol"}, 2)
    [told] = errors(logs)
    assert (told["key"], told["what"]) == ("/kafscale/kproxy/users/alice", "a user in etcd")
    assert "SECRET" not in str(logs)
    # A load brings the same invalid value again, which is not reported twice; a user that it lacks is removed.
    broken = KeyValue(KEYS.user("alice"), b"SECRET", 1, site.revision - 1, 1, 0)
    with capture_logs() as logs:
        await site.take([broken, site.kv(KEYS.user("dave"), ALICE)])
    assert (site.names, site.failed, errors(logs)) == ({"alice", "dave"}, 2, [])
    site.delete(KEYS.user("alice"))
    site.delete(KEYS.user("nobody"))
    assert site.names == {"dave"}


async def test_user_added_again_is_another() -> None:
    site = Copy()
    await site.snapshot(alice=ALICE)
    before = site.copy.users.creation("alice")
    assert before is not None
    site.put(KEYS.user("alice"), encode_user(sasl.credentials_of("bob")))
    site.put(KEYS.user("alice"), b"SECRET")
    assert site.copy.users.creation("alice") == before
    key = KEYS.user("alice")
    removed, added = KeyValue(key, b"", 0, 11, 0, 0), KeyValue(key, ALICE, 12, 12, 1, 0)
    site.copy.on_events([WatchEvent(True, removed), WatchEvent(False, added)], 12)
    assert site.copy.users.creation("alice") == 12
    # Its last good value is the earlier one.
    await site.take([KeyValue(key, b"SECRET", 14, 15, 2, 0)])
    assert site.copy.users.creation("alice") == 12
    site.delete(KEYS.user("alice"))
    assert site.copy.users.creation("alice") is None
    assert not site.copy._users.created


async def test_each_rule_change_is_reported() -> None:
    site, seen = Copy(), list[bool]()

    def look() -> None:
        permissions = Rules(site.copy.acls).of(Principal("a"))
        seen.append(permissions.allows(Operation.READ, Resource.TOPIC, "t"))

    site.copy.on_acls = look
    await site.take([])
    rule = b'{"principal": "User:a", "operations": ["read"], "topics": ["t"]%s}'
    site.put(KEYS.acl("one"), rule % b"")
    site.put(KEYS.acl("two"), rule % b', "effect": "deny"')
    site.put(KEYS.acl("one"), b"broken")
    site.delete(KEYS.acl("two"))
    site.delete(KEYS.acl("one"))
    site.put(KEYS.acl("a/b"), rule % b"")
    assert seen == [False, True, False, True, False]
    assert (site.counters["tls.reloads.done"], site.failed) == (4, 2)


async def test_users_beyond_the_bound_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_etcd, "MOST_USERS", 2)
    site = Copy()
    with capture_logs() as logs:
        await site.snapshot(alice=ALICE, bob=ALICE, carol=ALICE)
    assert site.names == {"alice", "bob"}
    assert "more than 2 users" in errors(logs)[0]["reason"]
    bobs = encode_user(sasl.credentials_of("bob"))
    site.put(KEYS.user("alice"), bobs)
    assert decode_user(bobs) == site.copy.users.by_name["alice"]
    site.put(KEYS.user("alice"), b"SECRET")
    assert site.names == {"alice", "bob"}
    site.delete(KEYS.user("bob"))
    site.put(KEYS.user("carol"), ALICE)
    assert site.names == {"alice", "carol"}


async def test_restored_etcd_replaces_all_values() -> None:
    site = Copy()
    await site.snapshot(alice=b"SECRET", bob=ALICE)
    site.copy.on_restored()
    assert site.names == {"bob"}
    # Revisions of another cluster's history say nothing: the same number may belong to another value.
    await site.take([KeyValue(KEYS.user("alice"), b"OTHER", 1, 1, 1, 0)])
    assert (site.names, site.failed) == (set(), 2)


async def test_changes_are_reported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """This covers changes and later snapshots, but not the first snapshot, and no user's value."""
    told: list[tuple[str, list[str], list[str], list[str]]] = []

    def tell(_: object, event: str, **fields: Any) -> None:
        if event == "changed":
            told.append((fields["what"], fields["added"], fields["removed"], fields["changed"]))
        else:
            assert (event, fields["what"]) == ("not_reloaded", "user in etcd: /kafscale/kproxy/users/bob")

    monkeypatch.setattr(SecurityEvents, "tell", tell)
    watched = Copy()
    await watched.snapshot(alice=ALICE)
    watched.put(KEYS.user("bob"), ALICE)
    watched.put(KEYS.user("bob"), encode_user(sasl.credentials_of("bob")))
    watched.put(KEYS.user("bob"), b"invalid")
    watched.put(KEYS.acl("one"), b'{"principal": "User:a", "operations": ["read"], "topics": ["t*"]}')
    await watched.snapshot(alice=ALICE)
    assert told == [
        ("users in etcd", ["bob"], [], []),
        ("users in etcd", [], [], ["bob"]),
        ("rules in etcd", ["one: allow User:a read topic t*"], [], []),
        ("users in etcd", [], ["bob"], []),
        ("rules in etcd", [], ["one: allow User:a read topic t*"], []),
    ]
