"""Every group and resource has its own key for claims and members in etcd, and no other key is read."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kproxy.claims.keys import ClaimValue, MemberValue, OwnKeys, decode_claim, decode_member, encode_value
from kproxy_codec.own import MAX_NAME_BYTES, WHOLE_GROUP

KEYS = OwnKeys("/pre fix")
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
# Characters with a meaning in keys, in paths and in percent-encoding, in any order.
AWKWARD = st.text(st.sampled_from("*/%2Aa.~ \x00\nü\U0001f600"), min_size=1, max_size=12)
ANY_NAME = NAMES | AWKWARD
REFUSED = r"expected a group|a name has more|not the canonical key|can't decode"
NATURAL = st.integers(0, (1 << 63) - 1)


@given(ANY_NAME, ANY_NAME | st.just(WHOLE_GROUP))
@example("*", "*")
@example("a/b", "%2F")
@example("%2A", "%2A")
@example("..", ".")
def test_groups_and_resources_survive_a_round_trip(group: str, resource: str) -> None:
    key = KEYS.claim(group, resource)
    assert KEYS.parse_claim(key) == (group, resource)
    assert key.startswith(KEYS.group(group))
    assert KEYS.group(group).startswith(KEYS.claims)
    assert not key.startswith(KEYS.members)
    assert key.isascii()


@given(st.tuples(ANY_NAME, ANY_NAME), st.tuples(ANY_NAME, ANY_NAME))
def test_resource_and_group_keys_are_unique(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (KEYS.claim(*one) == KEYS.claim(*other)) == (one == other)
    assume(one[0] != other[0])
    assert not KEYS.claim(*one).startswith(KEYS.group(other[0]))


@given(st.text(max_size=20))
def test_claim_keys_are_read_only_as_written(rest: str) -> None:
    key = KEYS.claims + rest
    try:
        group, resource = KEYS.parse_claim(key)
    except ValueError:
        return
    assert KEYS.claim(group, resource) == key


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "/",
        "g",
        "g/",
        "/r",
        "g/r/s",
        "g//r",
        "g /r",
        "g/%2a",
        "g/%",
        "g/%zz",
        "g/%FF",
        "g/%ED%A0%80",
        "g/%61",
        "%2f/r",
        "g/ü",
        f"g/{'n' * (MAX_NAME_BYTES + 1)}",
        f"{'%C3%BC' * (MAX_NAME_BYTES // 2)}n/r",
    ],
)
def test_invalid_key_is_refused(rest: str) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        KEYS.parse_claim(KEYS.claims + rest)


def test_key_of_another_prefix_is_refused() -> None:
    for key in ("g/r", KEYS.member("1f"), "/other/kproxy/own/g/r"):
        with pytest.raises(ValueError, match=REFUSED):
            KEYS.parse_claim(key)


def test_longest_names_fit() -> None:
    longest = "ü" * (MAX_NAME_BYTES // 2)
    assert KEYS.parse_claim(KEYS.claim(longest, longest)) == (longest, longest)


def test_one_watch_covers_claims_and_members() -> None:
    for prefix in ("/p", "/p/"):
        keys = OwnKeys(prefix)
        assert keys.claim("g", WHOLE_GROUP) == "/p/kproxy/own/g/*"
        assert keys.member("1f") == "/p/kproxy/own-proxies/1f"
        assert keys.claims.startswith(keys.all)
        assert keys.members.startswith(keys.all)


CLAIMS = st.builds(ClaimValue, st.text(max_size=9), NATURAL, st.integers(1, (1 << 63) - 1), st.text(), st.integers())
PARTITIONS = st.lists(st.tuples(st.text(max_size=9), st.integers(0, 1 << 31)), max_size=4)
MEMBERS = st.builds(MemberValue, st.text(max_size=9), st.integers(0, 65_535), NATURAL, PARTITIONS)


@given(CLAIMS, MEMBERS)
def test_values_survive_a_round_trip(claim: ClaimValue, member: MemberValue) -> None:
    assert decode_claim(encode_value(claim)) == claim
    assert decode_member(encode_value(member)) == member


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b'{"proxy":"1f","connection":1}',
        b'{"proxy":"1f","connection":1,"generation":0}',
        b'{"proxy":"1f","connection":1,"generation":-1}',
        b'{"proxy":"1f","connection":-1,"generation":1}',
        b'{"proxy":"1f","connection":1,"generation":9223372036854775808}',
        b'{"proxy":"1f","connection":1,"generation":1.5}',
        b'{"proxy":31,"connection":1,"generation":1}',
        b'{"proxy":"1f","connection":1,"generation":1',
    ],
)
def test_invalid_claim_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="invalid ClaimValue"):
        decode_claim(value)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{}",
        b'{"host":"h"}',
        b'{"host":"h","port":-1}',
        b'{"host":"h","port":65536}',
        b'{"host":"h","port":1,"seen":-1}',
        b'{"host":"h","port":1,"seen":9223372036854775808}',
        b'{"host":"h","port":1,"unsettled":[["t"]]}',
        b'{"host":"h","port":1,"unsettled":{"t":1}}',
    ],
)
def test_invalid_member_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="invalid MemberValue"):
        decode_member(value)
