"""A real admin page with a token, of one process and of workers; commands send the token."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest

from tests.support.processes.dev import run_kproxy
from tests.support.processes.ports import free_port
from tests.support.processes.served import page, static_proxy

TOKEN = "a-token-of-the-operators"


def post(admin: str, **headers: str) -> int:
    host, _, port = admin.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        body = b'{"group": "g", "resources": ["t/0"]}'
        connection.request("POST", "/own/free", body, {"Content-Type": "application/json", **headers})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_token_is_required(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    rooms = f'[admin]\ntoken_file = "{tmp_path / "token"}"\n'
    with static_proxy(tmp_path, {1: free_port()}, rooms=rooms, more=["--workers", str(workers)]) as process:
        for path in ("/livez", "/metrics"):
            assert page(process.admin, path)[0] == 200
        assert page(process.admin, "/readyz")[0] in (200, 503)
        for path in ("/", "/table", "/own"):
            assert page(process.admin, path)[0] == 401
        assert page(process.admin, "/table", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert post(process.admin) == 401
        # No etcd here, so there are no claims.
        assert post(process.admin, Authorization=f"Bearer {TOKEN}") == 501
        assert post(process.admin, Authorization=f"Bearer {TOKEN}", Origin="http://evil.test") == 403
        done = run_kproxy("table", "--admin", process.admin)
        assert done.status != 0
        assert "KPROXY_ADMIN_TOKEN_FILE" in done.stderr
        monkeypatch.setenv("KPROXY_ADMIN_TOKEN_FILE", str(tmp_path / "token"))
        assert run_kproxy("table", "--admin", process.admin).status == 0
        assert TOKEN not in process.stderr()


@pytest.mark.parametrize("workers", [1, 2])
def test_foreign_page_can_neither_read_nor_change(tmp_path: Path, workers: int) -> None:
    with static_proxy(tmp_path, {1: free_port()}, more=["--workers", str(workers)]) as process:
        assert post(process.admin) == 501
        assert post(process.admin, Origin="http://evil.test") == 403
        assert post(process.admin, Host="evil.test") == 403
        for path in ("/", "/table", "/own"):
            status, text = page(process.admin, path, Host="evil.test")
            assert (status, "admin.hosts" in text) == (403, True)
            # No etcd here, so there are no claims.
            assert page(process.admin, path, Host="localhost")[0] == (501 if path == "/own" else 200)
        for path in ("/overview", "/events", "/clients", "/partitions", "/web/page.js"):
            assert page(process.admin, path, Host="evil.test", Accept="text/html")[0] == 403
        for path in ("/livez", "/metrics"):
            assert page(process.admin, path, Host="evil.test")[0] == 200
        # A loopback name that is neither an address nor known.
        done = run_kproxy("table", "--admin", f"127.1:{process.admin.rpartition(':')[2]}")
        assert done.status != 0
        assert "admin.hosts" in done.stderr
        assert "TOKEN" not in done.stderr
