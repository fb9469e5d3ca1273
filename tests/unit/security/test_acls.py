"""The ACL rules: what they allow, and their form in the configuration file."""

from __future__ import annotations

import random
import time
import tracemalloc
from pathlib import Path

import pytest
from click.testing import CliRunner

from kproxy.cli import cli
from kproxy.config import load_proxy_config
from kproxy.config.access import AclSection, parse_acls, read_acls
from kproxy.errors import StartupError
from kproxy.security import acls
from kproxy.security.acls import Acl, Operation, Permissions, Resource, Rules, acls_of
from kproxy.security.principals import Principal
from tests.support.rules import examples

ALICE = Principal("alice", frozenset({"team"}))
BOB = Principal("bob")


def rules(*given: dict[str, object]) -> Rules:
    return Rules(acls_of(parse_acls(list(given), "here")))


def allows(permissions: Permissions, operation: str, name: str, resource: Resource = Resource.TOPIC) -> bool:
    return permissions.allows(Operation(operation), resource, name)


def test_permissions_of_some_principals_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced permissions make a client forget its routes."""
    monkeypatch.setattr(acls, "MOST_PRINCIPALS", 3)
    some = rules({"principal": "User:*", "operations": ["read"], "topics": ["t"]})
    kept = some.of(ALICE)
    for name in ("a", "b"):
        some.of(Principal(name))
        assert some.of(ALICE) is kept
    some.of(Principal("c"))
    assert some.of(ALICE) is not kept


@pytest.mark.parametrize(
    ("allowed", "denied", "any_left"),
    [
        ([], [], False),
        (["t"], [], True),
        (["t"], ["t"], False),
        (["t"], ["*"], False),
        (["a*"], ["ab*"], True),
        (["ab*"], ["a*"], False),
        (["*"], ["a*"], True),
        (["*"], ["*"], False),
        (["t"], ["u"], True),
    ],
)
def test_any_writable_topic_is_detected(allowed: list[str], denied: list[str], any_left: bool) -> None:
    given: list[dict[str, object]] = []
    if allowed:
        given.append({"principal": "User:bob", "operations": ["write"], "topics": allowed})
    if denied:
        given.append({"principal": "User:bob", "operations": ["write"], "topics": denied, "effect": "deny"})
    assert rules(*given).of(BOB).allows_any(Operation.WRITE, Resource.TOPIC) is any_left


def test_prefix_within_another_prefix_hides_no_name() -> None:
    """Random rules seldom have one prefix before two that nest."""
    permissions = rules({"principal": "User:bob", "operations": ["write"], "topics": ["a*", "b*", "ba*"]}).of(BOB)
    assert all(allows(permissions, "write", name) for name in ("a", "b", "ba", "baa", "bb"))
    assert not allows(permissions, "write", "c")


def _model(acls: list[Acl], principal: Principal, operation: Operation, resource: Resource, name: str) -> bool:
    """Kafka's documented rule, applied to one ACL after another."""
    implies = {Operation.DESCRIBE: {Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER}}
    is_allowed = False
    for acl in acls:
        subjects = ("User:*", f"User:{principal.name}", *(f"Group:{group}" for group in principal.groups))
        fits = acl.subject in subjects and acl.resource is resource
        fits = fits and (name.startswith(acl.name) if acl.is_prefix else name == acl.name)
        if fits and (operation in acl.operations or Operation.ADMIN in acl.operations):
            if acl.is_denial:
                return False
            is_allowed = True
        elif fits and not acl.is_denial and implies.get(operation, set()) & acl.operations:
            is_allowed = True
    return is_allowed


def test_random_rules_decide_as_the_model_does() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    names = ["", "a", "ab", "abc", "ac", "b", "*", "\U0010ffff", "a\U0010ffff"]
    before: Rules | None = None
    for _ in range(examples(200)):
        acls = [
            Acl(
                rng.choice(["User:*", "User:alice", "User:bob", "Group:team", "Group:alice"]),
                rng.random() < 0.3,
                frozenset(rng.sample(list(Operation), rng.randint(1, 3))),
                rng.choice(list(Resource)),
                rng.choice(names),
                rng.random() < 0.5,
            )
            for _ in range(rng.randint(0, 8))
        ]
        some = before = Rules(acls, before)
        for principal in (ALICE, BOB):
            for operation in Operation:
                for resource in Resource:
                    for name in names:
                        expected = _model(acls, principal, operation, resource, name)
                        assert some.of(principal).allows(operation, resource, name) is expected
                        reasons = some.of(principal).reasons(operation, resource, name)
                        assert (bool(reasons["allow"]) and not reasons["deny"]) is expected
                    if any(_model(acls, principal, operation, resource, name) for name in names):
                        assert some.of(principal).allows_any(operation, resource)


def _write(subject: str, name: str, *, is_prefix: bool = False) -> Acl:
    return Acl(subject, False, frozenset({Operation.WRITE}), Resource.TOPIC, name, is_prefix)


def test_decision_does_not_scan_all_rules() -> None:
    """Each of 10,000 prefixes was tried for each name: 1,000 names in one request took 65 ms."""
    costs = []
    for count in (10, 10_000):
        permissions = Rules(_write("User:bob", f"team-{n:05d}-", is_prefix=True) for n in range(count)).of(BOB)
        permissions.allows(Operation.WRITE, Resource.TOPIC, "compiles them")
        tried = []
        for attempt in range(5):
            began = time.thread_time()
            for n in range(1_000):
                permissions.allows(Operation.WRITE, Resource.TOPIC, f"team-{n:05d}.{attempt}")
            tried.append(time.thread_time() - began)
        costs.append(min(tried))
    assert costs[1] < 8 * costs[0], costs


def test_requested_names_are_not_kept() -> None:
    """10,000 names of any length were kept: a client could fill 300 MB."""
    permissions = Rules([_write("User:bob", "t")]).of(BOB)
    permissions.allows(Operation.WRITE, Resource.TOPIC, "t")
    tracemalloc.start()
    try:
        for n in range(300):
            permissions.allows(Operation.WRITE, Resource.TOPIC, f"{n}" * 5_000)
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


def test_unaffected_permissions_keep_their_identity() -> None:
    team = _write("Group:team", "shared")
    first = Rules([_write("User:alice", "a"), _write("User:bob", "b"), team])
    alice, bob = first.of(ALICE), first.of(BOB)
    second = Rules([_write("User:alice", "a"), _write("User:bob", "b2"), team], first)
    assert second.of(ALICE) is alice
    assert second.of(BOB) is not bob
    third = Rules([_write("User:alice", "a"), _write("User:bob", "b2")], second)
    assert third.of(ALICE) is not alice
    assert not allows(third.of(ALICE), "write", "shared")
    assert allows(third.of(ALICE), "write", "a")


# The ACL file


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[acls]]", ["entry 1 of [[acls]]", "principal"]),
        ('[[acls]]\nprincipal = "alice"\noperations = ["read"]\ntopics = ["t"]', ["principal", "User:NAME"]),
        ('[[acls]]\nprincipal = "User:a"\noperations = []\ntopics = ["t"]', ["operations"]),
        (
            '[[acls]]\nprincipal = "User:a"\noperations = ["reed"]\ntopics = ["t"]',
            ["operations", "reed", "a list of read, "],
        ),
        ('[[acls]]\nprincipal = "User:a"\noperations = ["read"]', ["no resource"]),
        ('[[acls]]\nprincipal = "User:a"\noperations = ["read"]\ntopics = []', ["topics", "a list of names"]),
        ('[[acls]]\nprincipal = "User:a"\noperations = ["read"]\ntopic = ["t"]', ["topic", "topics"]),
        ("[acls]", ["[[acls]]"]),
        ("[access]\ndry_run = true", ["[[acls]]"]),
        ("[access]\ndry = true", ["access.dry", "access.dry_run"]),
        ("[[acl]]", ["acls"]),
    ],
)
def test_invalid_rule_is_reported(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text('[ownership]\netcd = "http://127.0.0.1:2379"\n' + text)
    with pytest.raises(StartupError) as raised:
        load_proxy_config(file, environ={})
    assert all(word in str(raised.value) for word in words), str(raised.value)


FILE = """\
[ownership]
etcd = "http://127.0.0.1:2379"
[[acls]]
principal = "User:alice"
operations = ["read", "write"]
topics = ["orders", "audit-*"]
groups = ["app"]
[[acls]]
principal = "Group:strangers"
operations = ["admin"]
effect = "deny"
topics = ["*"]
cluster = true
"""


def test_acl_file_is_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text(FILE)
    access = load_proxy_config(file, environ={}).access
    assert access is not None
    assert access.acls == read_acls(file)
    assert access.acls[0] == AclSection(
        principal="User:alice", operations=["read", "write"], topics=["orders", "audit-*"], groups=["app"]
    )
    shown = CliRunner().invoke(cli, ["check-config", "--config", str(file)], catch_exceptions=False)
    again = tmp_path / "again.toml"
    again.write_text(shown.output)
    assert read_acls(again) == access.acls


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (
            ["--operation", "write", "--topic", "audit-1"],
            0,
            ["allowed", "allow: User:alice read, write on topic audit-*"],
        ),
        (
            ["--operation", "write", "--topic", "audit-1", "--group", "strangers"],
            1,
            ["denied", "deny: Group:strangers"],
        ),
        (["--operation", "write", "--topic", "other"], 1, ["denied", "no rule allows it"]),
        (["--operation", "read", "--consumer-group", "app"], 0, ["allowed"]),
        (["--operation", "write", "--transactional-id", "x"], 1, ["denied"]),
        (["--operation", "describe", "--cluster"], 1, ["denied"]),
    ],
)
def test_rules_can_be_tried(tmp_path: Path, arguments: list[str], status: int, words: list[str]) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text(FILE)
    base = ["acl", "check", "--config", str(file), "--principal", "User:alice"]
    done = CliRunner().invoke(cli, [*base, *arguments], catch_exceptions=False, standalone_mode=False)
    assert done.return_value == status, done.output
    assert all(word in done.output for word in words), done.output
