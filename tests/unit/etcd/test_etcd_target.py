"""Which endpoints are valid, and the errors for the others."""

import pytest

from kproxy.etcd import EtcdClient, EtcdMisused, EtcdUnavailable
from kproxy.etcd.endpoints import parse_endpoint, parse_endpoints
from kproxy.etcd.messages import decode_key, encode_key, prefix_end


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("127.0.0.1:2379", ("127.0.0.1", 2379, False)),
        ("http://127.0.0.1:12379", ("127.0.0.1", 12379, False)),
        ("HTTP://etcd-0.etcd:2379/", ("etcd-0.etcd", 2379, False)),
        ("etcd", ("etcd", 2379, False)),
        (" etcd:1 ", ("etcd", 1, False)),
        ("[::1]:2380", ("::1", 2380, False)),
        ("http://[::1]", ("::1", 2379, False)),
        ("::1", ("::1", 2379, False)),
        ("https://etcd-0.etcd", ("etcd-0.etcd", 2379, True)),
    ],
)
def test_endpoint_is_host_and_port_with_optional_scheme(text: str, endpoint: tuple[str, int, bool]) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("unix://etcd.sock", "scheme"),
        ("", "host"),
        (":2379", "host"),
        ("a b:2379", "host"),
        ("user@etcd:2379", "host"),
        ("etcd:port", "port"),
        ("etcd:0", "port"),
        ("etcd:65536", "port"),
        ("etcd:-1", "port"),
        ("etcd:²", "port"),
        ("[::1", "address"),
        ("[::1]2379", "address"),
        ("1:2:3", "address"),
    ],
)
def test_invalid_endpoint_is_named_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(EtcdUnavailable, match=says) as raised:
        parse_endpoint(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("texts", "targets"),
    [
        (["10.0.0.1:1", "10.0.0.2:2", "http://10.0.0.1:1"], ["dns:///10.0.0.1:1", "dns:///10.0.0.2:2"]),
        (["https://a", "HTTPS://[::2]:5"], ["dns:///a:2379", "dns:///[::2]:5"]),
    ],
)
def test_each_member_has_a_target_of_its_own(texts: list[str], targets: list[str]) -> None:
    assert [endpoint.target for endpoint in parse_endpoints(texts)] == targets


@pytest.mark.parametrize(
    ("texts", "says"), [([], "No etcd endpoint"), (["https://a", "b"], "https://a, b mix TLS and plain text")]
)
def test_members_that_differ_in_tls_are_refused(texts: list[str], says: str) -> None:
    with pytest.raises(EtcdMisused, match=says):
        parse_endpoints(texts)


async def test_connecting_without_listener_names_endpoint_and_reason() -> None:
    client = EtcdClient(["127.0.0.1:1"], timeout_s=2)
    with pytest.raises(EtcdUnavailable, match=r"127\.0\.0\.1:1 does not answer: check the address.*refused"):
        await client.connect()
    await client.close()


async def test_unconnected_client_raises_an_error() -> None:
    client = EtcdClient(["127.0.0.1:1"])
    with pytest.raises(EtcdUnavailable, match="not connected"):
        await client.get("/a")


@pytest.mark.parametrize(
    ("prefix", "end"),
    [("/a/", b"/a0"), ("a", b"b"), ("", b"\0"), ("/aé", b"/a\xc3\xaa"), ("a\udcff", b"b"), ("\udcff\udcff", b"\0")],
)
def test_prefix_ends_before_the_next_unrelated_key(prefix: str, end: bytes) -> None:
    assert prefix_end(prefix) == end


def test_key_that_is_not_utf8_survives() -> None:
    assert encode_key(decode_key(b"/a/\xff\xfe")) == b"/a/\xff\xfe"
