"""The admin page's protection: the token, and requests that foreign web pages can make a browser send."""

from __future__ import annotations

from pathlib import Path

import pytest

from kproxy.config import Address, load_proxy_config
from kproxy.errors import StartupError
from kproxy.observe.page_guard import PageGuard

TOKEN = "0123456789abcdef"


def refused(guard: PageGuard, method: str, path: str, host: str = "127.0.0.1:9644", **more: str) -> int:
    """The status of the refusal; 0 for none."""
    refusal = guard.refusal(method, path, host, more.get("origin"), more.get("token", ""))
    return refusal[0] if refusal is not None else 0


def test_non_text_token_is_refused() -> None:
    assert refused(PageGuard(lambda: TOKEN), "GET", "/table", token=b"\xff".decode(errors="surrogateescape")) == 401


HOSTS = {
    "127.0.0.1:9644": 0,
    "[::1]:9644": 0,
    "[::1]": 0,
    "10.1.2.3": 0,
    "localhost:9644": 0,
    "PROXY.test:9644": 0,
    # A foreign page's name that resolves to this address.
    "evil.test:9644": 403,
    "127.0.0.1.evil.test": 403,
    "localhost.evil.test": 403,
    "": 403,
}


@pytest.mark.parametrize(("host", "status"), HOSTS.items())
def test_pages_need_a_known_host_unless_vital(host: str, status: int) -> None:
    guard = PageGuard(hosts=["proxy.test"])
    for path in ("/", "/table", "/own", "/metrics/", "//livez"):
        for method in ("GET", "HEAD", "OPTIONS"):
            assert refused(guard, method, path, host) == status
    for path in ("/metrics", "/livez", "/readyz"):
        assert refused(guard, "GET", path, host) == 0
    with_token = PageGuard(lambda: TOKEN)
    assert refused(with_token, "GET", "/table", host, token=TOKEN) == 0


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        *((host, None, status) for host, status in HOSTS.items()),
        ("PROXY.test:9644", "http://proxy.test:9644", 0),
        ("evil.test:9644", "http://evil.test:9644", 403),
        ("127.0.0.1:9644", "http://evil.test", 403),
        ("127.0.0.1:9644", "null", 403),
        ("127.0.0.1:9644", "http://127.0.0.1:9645", 403),
        ("127.0.0.1:9644", "http://127.0.0.1:9644", 0),
    ],
)
def test_change_is_accepted_from_known_origins_only(host: str, origin: str | None, status: int) -> None:
    guard = PageGuard(hosts=["proxy.test"])
    more = {} if origin is None else {"origin": origin}
    assert refused(guard, "POST", "/own/free", host, **more) == status


def test_token_protects_all_but_vital_pages() -> None:
    guard = PageGuard(lambda: TOKEN)
    for path in ("/", "/table", "/own", "/replication"):
        assert refused(guard, "GET", path) == 401
        assert refused(guard, "GET", path, token="wrong") == 401
        assert refused(guard, "GET", path, token=TOKEN) == 0
    for path in ("/livez", "/readyz", "/metrics"):
        assert refused(guard, "GET", path) == 0
        assert refused(PageGuard(lambda: TOKEN, token_for_all=True), "GET", path) == 401
    assert refused(guard, "POST", "/own/free") == 401
    # A client with the token may call the page by any name, but not from another page.
    assert refused(guard, "POST", "/own/free", "any.test", token=TOKEN) == 0
    assert refused(guard, "POST", "/own/free", "any.test", token=TOKEN, origin="http://evil.test") == 403


def load(directory: Path, text: str, **environ: str) -> object:
    file = directory / "kproxy.toml"
    file.write_text('[ownership]\netcd = "http://127.0.0.1:2379"\n' + text)
    return load_proxy_config(file, environ=environ)


@pytest.mark.parametrize("text", [":9644", "9644", "127.0.0.1:9644"])
def test_address_without_a_host_is_loopback(tmp_path: Path, text: str) -> None:
    config = load(tmp_path, f'[listen]\nadmin = "{text}"')
    assert getattr(config, "admin") == Address("127.0.0.1", 9644)  # noqa: B009


def test_token_is_read_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    config = load(tmp_path, f'[listen]\nadmin = ":0"\n[admin]\ntoken_file = "{tmp_path / "token"}"')
    assert TOKEN not in repr(config)
    config = load(tmp_path, '[listen]\nadmin = ":0"', KPROXY_ADMIN__TOKEN=TOKEN)
    assert TOKEN not in repr(config)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[admin]\ntoken = "0123456789abcdef"', ["--admin"]),
        ('[listen]\nadmin = ":1"\n[admin]\ntoken = "short-secret"', ["16"]),
        ('[listen]\nadmin = ":1"\n[admin]\ntoken = "a"\ntoken_file = "b"', ["twice"]),
        ('[listen]\nadmin = ":1"\n[admin]\ntoken_for_all = true', ["admin.token_file"]),
        ('[listen]\nadmin = ":1"\n[admin]\ntoken_file = "/nowhere"', ["/nowhere"]),
    ],
)
def test_ineffective_protection_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(StartupError) as raised:
        load(tmp_path, text)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert "short-secret" not in str(raised.value)
