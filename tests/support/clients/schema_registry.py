"""Run schema registries for tests: a stand-in over HTTP, and Apicurio, a real one.

The stand-in has the part of Confluent's REST API that ingest uses: its paths, statuses, error codes and fields of
answers. It takes any schema. Of Avro's compatibility it knows that a field keeps its type, and that a new one needs a
default. The same tests run with both, so the stand-in answers as Apicurio does.
"""

from __future__ import annotations

import base64
import json
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

from tests.support.brokers.kafka_jars import registry_archive
from tests.support.clients.java import java_executable
from tests.support.processes.ports import free_port

START_TIMEOUT_S = 300.0
MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"


class StandIn(ThreadingHTTPServer):
    """A registry in memory. `user` is a pair of name and password that it asks for; None: it asks for none."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.schemas: list[tuple[str, str]] = []
        self.subjects: dict[str, list[int]] = {}
        self.user: tuple[str, str] | None = None
        self.asked: list[str] = []
        # A status and a body for every request, instead of an answer.
        self.instead: tuple[int, bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        _, what, name, *rest = path.split("/")
        if what == "schemas":
            return 200, {"schema": self.schemas[int(rest[0]) - 1][0]}
        subject = unquote(name)
        ids = self.subjects.get(subject, [])
        if method == "GET" and rest == ["versions", "latest"]:
            return (200, self._described(subject, ids[-1])) if ids else _error(40401, f"Subject '{subject}' not found.")
        schema = (body["schema"], body.get("schemaType", "AVRO"))
        known = self.schemas.index(schema) + 1 if schema in self.schemas else 0
        if rest == []:
            if not ids:
                return _error(40401, f"Subject '{subject}' not found.")
            return (200, self._described(subject, known)) if known in ids else _error(40403, "Schema not found")
        if ids and not _is_compatible(self.schemas[ids[-1] - 1], schema):
            return _error(409, "Schema being registered is incompatible with an earlier schema; {oldSchema: ...}")
        if not known:
            self.schemas.append(schema)
            known = len(self.schemas)
        if known not in ids:
            self.subjects.setdefault(subject, []).append(known)
        return 200, {"id": known}

    def _described(self, subject: str, schema_id: int) -> dict[str, Any]:
        schema, kind = self.schemas[schema_id - 1]
        version = self.subjects[subject].index(schema_id) + 1
        found = {"subject": subject, "version": version, "id": schema_id, "schema": schema}
        return found if kind == "AVRO" else {**found, "schemaType": kind}


def _is_compatible(earlier: tuple[str, str], later: tuple[str, str]) -> bool:
    if earlier[1] != later[1]:
        return False
    if earlier[1] != "AVRO":
        return True
    before, after = ({field["name"]: field for field in json.loads(text)["fields"]} for text, _ in (earlier, later))
    return all(
        before[name]["type"] == field["type"] if name in before else "default" in field for name, field in after.items()
    )


def _error(code: int, message: str) -> tuple[int, Any]:
    return int(str(code)[:3]), {"error_code": code, "message": message}


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        registry = self.server
        registry.asked.append(f"{self.command} {self.path}")
        wanted = None if registry.user is None else base64.b64encode(":".join(registry.user).encode()).decode()
        if wanted is not None and self.headers.get("Authorization") != f"Basic {wanted}":
            status, content = 401, b'{"error_code":401,"message":"Unauthorized"}'
        elif registry.instead is not None:
            status, content = registry.instead
        else:
            status, answer = registry.answer(self.command, self.path, body)
            content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", MEDIA_TYPE)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Write nothing to stderr."""


@contextmanager
def standing_in() -> Iterator[StandIn]:
    with StandIn() as registry:
        Thread(target=registry.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield registry
        finally:
            registry.shutdown()


@contextmanager
def apicurio(directory: Path) -> Iterator[str]:
    """A real registry, with its schemas in memory, that takes only compatible ones (BACKWARD). Yield its address."""
    with tarfile.open(registry_archive()) as archive:
        archive.extractall(directory, filter="data")
    (runner,) = directory.glob("apicurio-registry-app-*-runner.jar")
    port = free_port()
    url = f"http://127.0.0.1:{port}/apis/ccompat/v7"
    settings = (f"-Dquarkus.http.port={port}", "-Dquarkus.http.host=127.0.0.1")
    sizes = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
    with (directory / "log").open("wb") as log:
        command = [java_executable(), *sizes, *settings, "-jar", str(runner)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Listening on" not in (said := (directory / "log").read_text(errors="replace")):
            assert process.poll() is None, f"the registry ended: {said[-2000:]}"
            assert time.monotonic() < deadline, f"the registry has not started: {said[-2000:]}"
            time.sleep(0.1)
        body = json.dumps({"compatibility": "BACKWARD"}).encode()
        asked = urllib.request.Request(f"{url}/config", body, {"Content-Type": MEDIA_TYPE}, method="PUT")
        urllib.request.urlopen(asked, timeout=START_TIMEOUT_S).close()
        yield url
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)


def schema_of(url: str, schema_id: int) -> str:
    """The text of a schema, as a consumer asks for it."""
    with urllib.request.urlopen(f"{url}/schemas/ids/{schema_id}", timeout=START_TIMEOUT_S) as answer:
        return str(json.load(answer)["schema"])
