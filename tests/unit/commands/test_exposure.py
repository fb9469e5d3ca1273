"""Secrets that other users can read are found by their file's mode; read-only mounts are accepted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kproxy.config import build_proxy_config, load_settings
from kproxy.config.exposure import exposed
from kproxy.config.proxy import secret_files
from kproxy.errors import StartupError
from kproxy.security.users import read_users
from tests.support.security.tls_files import Signer


def written(directory: Path, text: str) -> dict[str, list[str]]:
    """The reports about a configuration, by file."""
    file = directory / "kproxy.toml"
    file.write_text('[ownership]\netcd = "http://127.0.0.1:2379"\n' + text)
    settings = load_settings(file, environ={})
    told: dict[str, list[str]] = {}
    for each in exposed(secret_files(build_proxy_config(settings), settings)):
        told.setdefault(each.file.name, []).append(each.what)
    return told


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o604, 0o602])
def test_every_kind_of_secret_is_found(tmp_path: Path, signer: Signer, mode: int) -> None:
    pair = signer.issue("pair", "localhost")
    listed, to_brokers, of_page = (tmp_path / f"{name}.key" for name in ("listed", "brokers", "page"))
    for key in (listed, to_brokers, of_page):
        key.write_bytes(pair.key.read_bytes())
    for name in ("password", "token", "etcd"):
        (tmp_path / name).write_text("a-secret-of-twenty-letters")
    text = f"""
[[listeners]]
name = "first"
listen = "127.0.0.1:1"
tls.cert = "{pair.cert}"
tls.key = "{listed}"
[listen]
admin = "127.0.0.1:0"
[admin]
token_file = "{tmp_path / "token"}"
tls.cert = "{pair.cert}"
tls.key = "{of_page}"
[broker_tls]
cert = "{pair.cert}"
key = "{to_brokers}"
[broker_sasl]
mechanism = "PLAIN"
username = "kproxy"
password_file = "{tmp_path / "password"}"
[etcd]
username = "kproxy"
password_file = "{tmp_path / "etcd"}"
"""
    for file in tmp_path.iterdir():
        file.chmod(mode)
    assert written(tmp_path, text) == (
        {
            "brokers.key": ["broker_tls.key"],
            "etcd": ["etcd.password_file"],
            "listed.key": ["tls.key of listener 'first'"],
            "page.key": ["admin.tls.key"],
            "password": ["broker_sasl.password_file"],
            "token": ["admin.token_file"],
        }
        if mode & 0o007
        else {}
    )


def test_configuration_counts_if_it_holds_secrets(tmp_path: Path) -> None:
    token = '[listen]\nadmin = "127.0.0.1:0"\n[admin]\ntoken = "a-secret-of-twenty-letters"\n'
    assert written(tmp_path, "") == {}
    assert written(tmp_path, token) == {"kproxy.toml": ["admin.token"]}
    (tmp_path / "kproxy.toml").chmod(0o600)
    assert written(tmp_path, token) == {}


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Callable[[], object]]]:
    """A Secret as Kubernetes mounts it, a link to a file of mode 0644 in a tmpfs; and its read-only mark."""
    mount = tmp_path / "mount"
    mount.mkdir()
    is_real = _run("mount", "-t", "tmpfs", "tmpfs", mount)
    try:
        (mount / "..data").mkdir()
        (mount / "..data" / "token").write_text("a-secret")
        (mount / "token").symlink_to(Path("..data") / "token")
        if is_real:
            yield mount, lambda: _run("mount", "-o", "remount,ro", mount)
        else:
            # Nothing can be mounted here.
            yield mount, lambda: monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    finally:
        if is_real:
            _run("umount", "-l", mount)


def _run(*command: str | Path) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_users_in_read_only_mount_are_read(mounted: tuple[Path, Callable[[], object]]) -> None:
    mount, make_read_only = mounted
    (mount / "token").write_text("[users]\n")
    with pytest.raises(StartupError, match=r"sasl\.users: its file .*token has the mode 0644"):
        read_users(mount / "token")
    make_read_only()
    assert read_users(mount / "token").by_name == {}


def test_file_in_read_only_mount_is_accepted(mounted: tuple[Path, Callable[[], object]]) -> None:
    mount, make_read_only = mounted
    secret = [("admin.token_file", mount / "token")]
    assert [each.what for each in exposed(secret)] == ["admin.token_file"]
    make_read_only()
    assert (mount / "token").stat().st_mode & 0o777 == 0o644
    assert exposed(secret) == []
