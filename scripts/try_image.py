"""Try the container image without a container engine: its steps, in root file systems of Debian packages.

`sudo python3 scripts/try_image.py`, on Linux, with mmdebstrap and an etcd (on PATH, or the one of `make install`). It
takes some minutes. The Dockerfile's build stage runs in one root; only /opt/kproxy is copied to a second one, as by
`COPY --from`. There `kproxy broker` and `kproxy serve` run as in the image: with its entry point, as its user, as
process 1, on a read-only root file system, without a shell. The image's health check must succeed, and `kproxy doctor`
must write and read a record.

Not tried: Docker itself, and the base image; the same Debian release with its own Python replaces it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
DOCKERFILE = (REPOSITORY / "deploy/docker/Dockerfile").read_text()
IGNORED = (REPOSITORY / "deploy/docker/Dockerfile.dockerignore").read_text()
PATIENCE_S = 60.0
GRACE_S = 35.0
SHELLS = ("sh", "bash", "dash", "rbash")
# The certificate settings of the machine's own pip apply in the first root too.
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def instruction(name: str) -> str:
    """Return the arguments of the last instruction of that name in the Dockerfile."""
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE)
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)[-1]


SUITE = re.findall(r"^ARG PYTHON=.*-slim-(\w+)$", DOCKERFILE, re.MULTILINE)[0]
USER = instruction("USER")
ENTRYPOINT: list[str] = json.loads(instruction("ENTRYPOINT"))
HEALTHCHECK: list[str] = json.loads(re.sub(r"^.*CMD (?=\[)", "", instruction("HEALTHCHECK")))
INSTALL = instruction("RUN").replace("${COMMIT}", "trial")
ENVIRON = {"PATH": "/opt/kproxy/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONDONTWRITEBYTECODE": "1"}


def run(*command: str | Path, **options: object) -> None:
    subprocess.run(list(map(str, command)), check=True, **options)  # type: ignore[call-overload]


def debian(root: Path, *packages: str) -> None:
    print(f"Debian {SUITE} with {', '.join(packages)} ...", flush=True)
    run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}", SUITE, root)


def copy_context(target: Path) -> None:
    """Copy the files that .dockerignore lets through."""
    for line in IGNORED.splitlines():
        if line.startswith("!"):
            name = line[1:]
            source, copied = REPOSITORY / name, target / name
            copied.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copied, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, copied)


def build(root: Path) -> None:
    copy_context(root / "src")
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    if CERTIFICATES.exists():
        shutil.copy(CERTIFICATES, root / "etc/trial-certificates.pem")
    print(f"{INSTALL} ...", flush=True)
    environ = {"PATH": ENVIRON["PATH"], "PIP_CERT": "/etc/trial-certificates.pem"}
    run("chroot", root, "sh", "-c", f"cd /src && {INSTALL}", env=environ)


@contextlib.contextmanager
def read_only(root: Path) -> Iterator[None]:
    """Mount the root file system on itself, read-only except /var/lib/kproxy."""
    data = root / "var/lib/kproxy"
    data.mkdir()
    run("mount", "--bind", root, root)
    try:
        run("mount", "-t", "tmpfs", "-o", "uid=65532,gid=65532", "tmpfs", data)
        run("mount", "-o", "remount,ro,bind", root)
        yield
    finally:
        run("umount", "--recursive", root)


def inside(root: Path, command: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """Return the command line to run a command in `root` as the image's user; `more` is for unshare."""
    return ["unshare", "--mount", *more, "chroot", f"--userspec={USER}", str(root), *command]


@contextlib.contextmanager
def serving(root: Path, *arguments: str) -> Iterator[None]:
    """Run the image's entry point as process 1 of a namespace of its own, until SIGTERM; it must then end well."""
    command = inside(root, [*ENTRYPOINT, *arguments], ["--pid", "--fork"])
    process = subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready "), f"{arguments[0]} did not serve: {line!r}"
        print(line, end="", flush=True)
        yield
        began = time.monotonic()
        signal_first(process.pid, signal.SIGTERM)
        status = process.wait(GRACE_S)
        assert status == 0, f"{arguments[0]} ended with status {status}"
        print(f"{arguments[0]} ended {time.monotonic() - began:.1f} s after SIGTERM", flush=True)
    finally:
        if process.poll() is None:
            # When process 1 ends, its whole namespace ends.
            signal_first(process.pid, signal.SIGKILL)
            process.wait()


def signal_first(unshare: int, number: int) -> None:
    """Send a signal to process 1 of the namespace that `unshare` made."""
    for child in Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split():
        os.kill(int(child), number)


@contextlib.contextmanager
def etcd(directory: Path) -> Iterator[str]:
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        client, peer = (f"http://127.0.0.1:{each.getsockname()[1]}" for each in (one, two))
    urls = ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
    urls += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    binary = shutil.which("etcd") or str(REPOSITORY / ".venv/bin/etcd")
    with (directory / "etcd.log").open("wb") as log:
        process = subprocess.Popen([binary, "--data-dir", directory / "etcd", *urls], stdout=log, stderr=log)
    try:
        yield client
    finally:
        process.terminate()
        process.wait()


def is_healthy(root: Path) -> bool:
    return subprocess.run(inside(root, HEALTHCHECK), env=ENVIRON, capture_output=True, check=False).returncode == 0


def try_it(root: Path, endpoint: str) -> None:
    assert not is_healthy(root), "the health check takes a proxy that is not there for well"
    there = ["--etcd", endpoint]
    broker = ["broker", "--node-id", "1", "--data-dir", "/var/lib/kproxy/1", "--replication-factor", "1", *there]
    serve = ["serve", "--listen", "0.0.0.0:9092", "--advertise", "127.0.0.1:9092", "--admin", "0.0.0.0:9644"]
    with serving(root, *broker):
        with serving(root, *serve, "--drain-delay", "1", *there):
            until_healthy(root)
            run(*inside(root, [*ENTRYPOINT, "doctor", "--bootstrap", "127.0.0.1:9092"]), env=ENVIRON)
            writing = inside(root, ["/opt/kproxy/bin/python", "-c", "open('/opt/kproxy/written', 'w')"])
            refused = subprocess.run(writing, env=ENVIRON, capture_output=True, text=True, check=False)
            assert "Read-only file system" in refused.stderr, refused
        with serving(root, *serve, "--workers", "2", *there):
            until_healthy(root)


def until_healthy(root: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_healthy(root):
        assert time.monotonic() < deadline, "the health check does not pass"
        time.sleep(0.5)
    print("healthy", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kproxy-image-") as name:
        built, root = Path(name) / "build", Path(name) / "image"
        debian(built, "python3", "python3-venv", "python3-dev", "gcc", "ca-certificates")
        build(built)
        debian(root, "python3")
        shutil.copytree(built / "opt/kproxy", root / "opt/kproxy", symlinks=True)
        for shell in SHELLS:
            (root / "usr/bin" / shell).unlink(missing_ok=True)
        listed = json.loads((root / "opt/kproxy/share/kproxy/sbom.cdx.json").read_text())
        names = sorted(each["name"] for each in listed["components"])
        print(f"SBOM: {listed['bomFormat']} {listed['specVersion']}, {len(names)} components: {', '.join(names)}")
        with read_only(root), etcd(Path(name)) as endpoint:
            try_it(root, endpoint)
    print("The image's steps work.")


if __name__ == "__main__":
    if os.geteuid() or sys.platform != "linux":
        sys.exit("try_image.py: it needs Linux, and root for chroot and mounts: sudo python3 scripts/try_image.py")
    main()
