"""Hold conversations about a consumer group, request by request, and record every answer to its members.

A conversation is held in several versions of each API. Answers are compared as text in which ids and names that differ
between clusters are replaced.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any, NamedTuple

from kproxy.proxy.apis import SERVED
from kproxy_codec import api_keys as keys
from kproxy_codec import error_codes as codes
from tests.support.brokers.reference_broker import Closed, RawClient
from tests.support.waiting import wait_for

# Levels: of each API a version of old clients, of those with static members, and the highest that all sides have.
LEVELS: Mapping[str, Mapping[int, int]] = {
    name: dict(
        zip(
            (
                *(keys.JOIN_GROUP, keys.SYNC_GROUP, keys.HEARTBEAT, keys.LEAVE_GROUP, keys.OFFSET_COMMIT),
                *(keys.OFFSET_FETCH, keys.LIST_GROUPS, keys.DESCRIBE_GROUPS, keys.DELETE_GROUPS, keys.OFFSET_DELETE),
                keys.FIND_COORDINATOR,
            ),
            versions,
            strict=True,
        )
    )
    for name, versions in {
        "old": (0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0),
        "static": (5, 3, 3, 3, 7, 5, 4, 4, 1, 0, 3),
        "new": (9, 5, 4, 5, 9, 7, 5, 6, 2, 0, 6),
    }.items()
}
# The first version with a field. Builders refuse a field that a version lacks.
SINCE = {
    (keys.JOIN_GROUP, "rebalance_timeout_ms"): 1,
    (keys.JOIN_GROUP, "group_instance_id"): 5,
    (keys.SYNC_GROUP, "group_instance_id"): 3,
    (keys.SYNC_GROUP, "protocol_type"): 5,
    (keys.SYNC_GROUP, "protocol_name"): 5,
    (keys.HEARTBEAT, "group_instance_id"): 3,
    (keys.OFFSET_COMMIT, "group_instance_id"): 7,
    (keys.LIST_GROUPS, "states_filter"): 4,
    (keys.LIST_GROUPS, "types_filter"): 5,
    (keys.FIND_COORDINATOR, "key_type"): 1,
}
HIDDEN = ("throttle_time_ms", "error_message", "client_host", "node_id", "host", "port")


class Place(NamedTuple):
    """Where requests go: the proxy, or else the coordinator; what the proxy does not serve goes there anyway."""

    coordinator: int
    proxy: int | None
    topic: str


class Talk:
    """A conversation about one group; `answers` are by what was asked."""

    def __init__(self, place: Place, level: str, stack: ExitStack) -> None:
        self.place = place
        self.versions = LEVELS[level]
        self.answers: dict[str, Any] = {}
        self.group = f"group-{uuid.uuid4().hex[:12]}"
        self.ids: dict[str, str] = {}
        self.generations: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._stack = stack
        self._clients: dict[tuple[str, int], RawClient] = {}
        self._asked: dict[str, tuple[str, RawClient]] = {}

    def version(self, api_key: int) -> int:
        return self.versions[api_key]

    # Any request

    def ask(self, what: str, api_key: int, by: str = "", **fields: Any) -> Any:
        self.begin(what, api_key, by, **fields)
        return self.end(by)

    def begin(self, what: str, api_key: int, by: str, **fields: Any) -> None:
        """Send a request; each member has connections of its own."""
        version = self.version(api_key)
        kept = {name: each for name, each in fields.items() if version >= SINCE.get((api_key, name), 0)}
        client = self.client(by, api_key)
        client.send(api_key, version, **kept)
        self._asked[by] = (f"{keys.name_of(api_key)}: {what}", client)

    def end(self, by: str) -> Any:
        """Receive the answer."""
        what, client = self._asked.pop(by)
        try:
            answer = client.receive().to_dict()
        except Closed:
            answer = {"connection": "closed"}
        if answer.get("member_id"):
            self.ids[by] = answer["member_id"]
            self._names[answer["member_id"]] = by
        if answer.get("generation_id", -1) >= 0:
            self.generations[by] = answer["generation_id"]
        self.note(what, answer)
        return answer

    def note(self, what: str, answer: Any) -> None:
        assert what not in self.answers, f"asked twice: {what}"
        self.answers[what] = answer

    def client(self, by: str, api_key: int) -> RawClient:
        goes_to_proxy = self.place.proxy is not None and api_key in SERVED
        port = self.place.proxy if goes_to_proxy and self.place.proxy is not None else self.place.coordinator
        if (by, port) not in self._clients:
            self._clients[by, port] = self._stack.enter_context(RawClient("127.0.0.1", port))
        return self._clients[by, port]

    def heard(self) -> dict[str, str]:
        """All that the answers say; ids are by member, with their beginnings."""
        return {what: " ".join(said(answer, self._renamed)) for what, answer in self.answers.items()}

    def _renamed(self, text: str) -> str:
        if text in self._names and len(text) > 36:
            return f"<{self._names[text]} {text[:-36]}>"
        return text.replace(self.group or "no group", "<group>").replace(self.place.topic, "<topic>")

    # The requests of members

    def join_fields(self, by: str, **more: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "group_id": self.group,
            "session_timeout_ms": 30_000,
            "rebalance_timeout_ms": 60_000,
            "member_id": self.ids.get(by, ""),
            "protocol_type": "consumer",
            "protocols": protocols("range"),
        }
        return fields | more

    def join(self, what: str, by: str = "a", **more: Any) -> Any:
        return self.ask(what, keys.JOIN_GROUP, by, **self.join_fields(by, **more))

    def enter(self, what: str, by: str = "a", **more: Any) -> None:
        """Join, with the id that is given out first; `end` receives the answer."""
        if self.version(keys.JOIN_GROUP) >= 4 and not self.ids.get(by) and "group_instance_id" not in more:
            self.join(f"{what}, without an id", by, **more)
        self.begin(what, keys.JOIN_GROUP, by, **self.join_fields(by, **more))

    def begin_sync(self, what: str, by: str = "a", given: Mapping[str, bytes] | None = None, **more: Any) -> None:
        assignments = [
            {"member_id": self.ids.get(who, "nobody"), "assignment": each} for who, each in (given or {}).items()
        ]
        fields = {**self.member(by), "protocol_type": "consumer", "protocol_name": "range", "assignments": assignments}
        self.begin(what, keys.SYNC_GROUP, by, **(fields | more))

    def sync(self, what: str, by: str = "a", given: Mapping[str, bytes] | None = None, **more: Any) -> Any:
        self.begin_sync(what, by, given, **more)
        return self.end(by)

    def settle(self, by: str = "a", **more: Any) -> None:
        """Become the only member."""
        self.enter("a first member", by, **more)
        self.end(by)
        self.sync("the leader", by, {by: b"all"}, **{k: v for k, v in more.items() if k == "group_instance_id"})

    def member(self, by: str) -> dict[str, Any]:
        return {
            "group_id": self.group,
            "generation_id": self.generations.get(by, 1),
            "member_id": self.ids.get(by, "nobody"),
        }

    def beat(self, what: str, by: str = "a", **more: Any) -> Any:
        return self.ask(what, keys.HEARTBEAT, by, **(self.member(by) | more))

    def await_rebalance(self, by: str = "a", **more: Any) -> None:
        """Until another member's JoinGroup, which is on its way, has begun it."""
        version = self.version(keys.HEARTBEAT)
        client = self.client(by, keys.HEARTBEAT)
        asked = self.member(by) | more
        wait_for(lambda: client.request(keys.HEARTBEAT, version, **asked).error_code == codes.REBALANCE_IN_PROGRESS)

    def leave(self, what: str, *leaving: Mapping[str, Any], by: str = "a", **more: Any) -> Any:
        """Leave; versions before 3 have one member without an instance id."""
        members = [*leaving] or [{"member_id": self.ids.get(by, "nobody"), "group_instance_id": None}]
        named = {"members": members} if self.version(keys.LEAVE_GROUP) >= 3 else {"member_id": members[0]["member_id"]}
        return self.ask(what, keys.LEAVE_GROUP, by, **({"group_id": self.group} | named | more))

    def commit(self, what: str, *places: Any, by: str = "", **more: Any) -> Any:
        """Commit; `places` are partitions, or (topic, partition, offset, metadata)."""
        topics: dict[str, list[Any]] = {}
        for place in places or (0,):
            named = (self.place.topic, place, 5, "m") if isinstance(place, int) else place
            topic, partition, offset, metadata = named
            topics.setdefault(topic, []).append(
                {"partition_index": partition, "committed_offset": offset, "committed_metadata": metadata}
            )
        asked = [{"name": name, "partitions": partitions} for name, partitions in topics.items()]
        fields = {"group_id": self.group, "member_id": "", "generation_id_or_member_epoch": -1, "topics": asked}
        if by:
            fields |= {"member_id": self.ids[by], "generation_id_or_member_epoch": self.generations[by]}
        if self.version(keys.OFFSET_COMMIT) <= 4:
            fields["retention_time_ms"] = -1
        return self.ask(what, keys.OFFSET_COMMIT, by, **(fields | more))

    def fetch(self, what: str, *topics: tuple[str, list[int]], **more: Any) -> Any:
        asked = [{"name": name, "partition_indexes": indexes} for name, indexes in topics]
        asked = asked or [{"name": self.place.topic, "partition_indexes": [0, 1]}]
        return self.ask(what, keys.OFFSET_FETCH, **({"group_id": self.group, "topics": asked} | more))

    def describe(self, what: str, *groups: str) -> Any:
        return self.ask(what, keys.DESCRIBE_GROUPS, groups=list(groups or (self.group,)))

    def delete(self, what: str, *groups: str) -> Any:
        return self.ask(what, keys.DELETE_GROUPS, groups_names=list(groups or (self.group,)))

    def delete_offsets(self, what: str, topic: str = "", *indexes: int, **more: Any) -> Any:
        partitions = [{"partition_index": index} for index in indexes or (0,)]
        topics = [{"name": topic or self.place.topic, "partitions": partitions}]
        return self.ask(what, keys.OFFSET_DELETE, **({"group_id": self.group, "topics": topics} | more))

    def listed(self, what: str, **filters: Any) -> None:
        """Whether this group is listed, and how."""
        version = self.version(keys.LIST_GROUPS)
        kept = {name: each for name, each in filters.items() if version >= SINCE[keys.LIST_GROUPS, name]}
        answer = self.client("", keys.LIST_GROUPS).request(keys.LIST_GROUPS, version, **kept).to_dict()
        answer["groups"] = [each for each in answer["groups"] if each["group_id"] == self.group]
        self.note(f"ListGroups: {what}", answer)


def said(part: Any, renamed: Callable[[str], str], name: str = "") -> list[str]:
    """The fields of an answer; the order of arrays does not count."""
    if isinstance(part, Mapping):
        return [text for key, value in part.items() if key not in HIDDEN for text in said(value, renamed, key)]
    if isinstance(part, list | tuple):
        return [f"{name}[{len(part)}]", *chain(*sorted(said(each, renamed) for each in part))]
    if name == "error_code":
        return [codes.name_of(part)]
    value = repr(bytes(part)) if isinstance(part, bytes | bytearray | memoryview) else part
    return [f"{name}={renamed(str(value))}" if name else renamed(str(value))]


def protocols(*names: str, metadata: bytes = b"m") -> list[dict[str, Any]]:
    return [{"name": name, "metadata": metadata} for name in names]


def subscription(*topics: str) -> bytes:
    """A consumer's metadata: version 0, topics, no user data."""
    names = b"".join(len(each).to_bytes(2, "big") + each.encode() for each in topics)
    return b"\0\0" + len(topics).to_bytes(4, "big") + names + b"\xff\xff\xff\xff"
