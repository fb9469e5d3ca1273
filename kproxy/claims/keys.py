"""Build and parse the keys and values in etcd of claims and of members (the processes that claim).

    {prefix}/kproxy/own/{group}/{resource}   {"proxy": id, "connection": n, "generation": n, "client": text, "since": n}
    {prefix}/kproxy/own/{group}/*            the same, for the whole group
    {prefix}/kproxy/own-proxies/{id}         {"host": h, "port": p, "seen": revision, "unsettled": [[topic, partition]],
                                              "writer_groups": {topic: group}}

Each of these keys is on the lease of the process that made it, whose id is the lease's, in hexadecimal. Groups and
resources are percent-encoded, so that neither has a slash in a key, and no resource is written `*`. Claims and members
share a prefix, so that one watch reports claims, and the members that have seen them, in the order of the changes.
Invalid keys and values raise ValueError.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple, TypeVar
from urllib.parse import quote, unquote

import msgspec

from kproxy_codec.own import MAX_NAME_BYTES, WHOLE_GROUP

_WHOLE: Final = "*"
_MAX_INT64: Final = (1 << 63) - 1
_Natural = Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT64)]
_Value = TypeVar("_Value", bound=msgspec.Struct)


class ClaimValue(msgspec.Struct, frozen=True):
    """`connection` is a number within the process `proxy`; `client` is for people; `since` is in ms since 1970."""

    proxy: str
    connection: _Natural
    generation: Annotated[int, msgspec.Meta(ge=1, le=_MAX_INT64)]
    client: str = ""
    since: int = 0


class MemberValue(msgspec.Struct, frozen=True):
    """A process that holds claims for its clients, and the address that it advertises.

    `seen` is the revision up to which it has acted upon every claim, except for the partitions in `unsettled`, whose
    earlier claimants may still have writes in flight through it.
    """

    host: str
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)]
    seen: _Natural = 0
    unsettled: list[tuple[str, int]] = []
    writer_groups: dict[str, str] = {}


class OwnKeys(NamedTuple):
    """Builds and parses the keys under `prefix`, the prefix of all keys in etcd."""

    prefix: str

    @property
    def all(self) -> str:
        """The prefix of all keys of claims and members."""
        return f"{self.prefix.rstrip('/')}/kproxy/own"

    @property
    def claims(self) -> str:
        return f"{self.all}/"

    @property
    def members(self) -> str:
        return f"{self.all}-proxies/"

    @property
    def at_work(self) -> str:
        """The key of `kproxy.claims.member.AtWorkMark`."""
        return f"{self.all}-at-work"

    def group(self, group: str) -> str:
        """Return the prefix of the keys of a group's claims."""
        return f"{self.claims}{quote(group, safe='')}/"

    def claim(self, group: str, resource: str) -> str:
        return self.group(group) + (quote(resource, safe="") if resource != WHOLE_GROUP else _WHOLE)

    def member(self, member: str) -> str:
        return f"{self.members}{member}"

    def parse_claim(self, key: str) -> tuple[str, str]:
        """Return the group and the resource, WHOLE_GROUP for all of them."""
        group, slash, resource = key.removeprefix(self.claims).partition("/")
        if not slash or not group or not resource:
            raise ValueError(f"invalid key {key!r}; expected a group and a resource")
        found = _unquoted(group), WHOLE_GROUP if resource == _WHOLE else _unquoted(resource)
        if self.claim(*found) != key:
            raise ValueError(f"{key!r} is not the canonical key of its group and resource")
        return found


def _unquoted(text: str) -> str:
    name = unquote(text, errors="strict")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"a name has more than {MAX_NAME_BYTES} bytes")
    return name


def encode_value(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value)


def decode_claim(value: bytes) -> ClaimValue:
    return _decode(value, ClaimValue)


def decode_member(value: bytes) -> MemberValue:
    return _decode(value, MemberValue)


def _decode(value: bytes, kind: type[_Value]) -> _Value:
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"invalid {kind.__name__}: {error}") from error
