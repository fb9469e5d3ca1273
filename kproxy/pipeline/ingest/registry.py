"""Get the id of a topic's value schema from a schema registry, with Confluent's REST API.

Karapace has the same API, and Apicurio has it below `/apis/ccompat/v7`. Errors name the address, the subject and the
registry's own message.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from importlib import util
from typing import Any, Final
from urllib.parse import quote

from kproxy.errors import StartupError
from kproxy.installed import install_command
from kproxy.pipeline.ingest.options import AVRO, JSON_SCHEMA, LATEST, PROTOBUF, IngestOptions

TIMEOUT_S: Final = 20.0
MAX_ANSWER_BYTES: Final = 16 << 20
# The longest message of a registry in an error.
SHOWN: Final = 600
_MEDIA_TYPE: Final = "application/vnd.schemaregistry.v1+json"
_TYPES: Final = {AVRO: "AVRO", PROTOBUF: "PROTOBUF", JSON_SCHEMA: "JSON"}
# The libraries of the extra `registry`, by the module that is imported.
_NEEDED: Final = {AVRO: "fastavro", PROTOBUF: "grpc_tools"}
# No such subject, version or schema.
_NOT_FOUND: Final = (40401, 40402, 40403)


class Registry:
    """The registry of a job that has a `value_format`, for its one subject."""

    def __init__(self, options: IngestOptions) -> None:
        """Prepare the requests. Raise StartupError if the format's library is not installed."""
        form = str(options.value_format)
        if form in _NEEDED and util.find_spec(_NEEDED[form]) is None:
            raise StartupError(f"--value-format {form} needs {_NEEDED[form]}: run `{install_command('registry')}`.")
        self._options = options
        self._where = f"--registry {options.registry}"
        self._subject = f"subject {options.value_subject} at {self._where}"
        self._type = _TYPES[form]
        self._headers = {"Accept": f"{_MEDIA_TYPE}, application/json", "Content-Type": _MEDIA_TYPE}
        self._user = "a client without a user"
        if options.registry_user is not None:
            self._user = f"the user {options.registry_user}"
            pair = f"{options.registry_user}:{options.registry_password}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"

    def latest(self) -> tuple[int, str] | None:
        """Return the id and text of the subject's latest schema, if that is the job's. Raise StartupError.

        The registry is asked in any case: it must answer, and the subject's schemas must be of the job's format.
        """
        found = self._ask("/versions/latest")
        if found is not None and (theirs := found.get("schemaType", _TYPES[AVRO])) != self._type:
            raise StartupError(f"{self._subject} has schemas of {theirs}, not {self._type}: give another --subject.")
        if self._options.value_schema != LATEST:
            return None
        if found is None:
            raise StartupError(f"there is no {self._subject}: register its schema, or leave out --value-schema latest.")
        if found.get("references"):
            raise StartupError(f"the schema of {self._subject} refers to other schemas: give a --value-schema FILE.")
        return found["id"], str(found.get("schema"))

    def id_of(self, text: str) -> int:
        """Return the id of the schema; register it if it is new to the subject. Raise StartupError."""
        # Without a type it is Avro, also for registries that know no other.
        asked = {"schema": text} | ({} if self._type == _TYPES[AVRO] else {"schemaType": self._type})
        # First look it up: for that a user need not write.
        found = self._ask("", asked) or self._ask("/versions", asked)
        if found is None:
            raise StartupError(f"{self._subject} cannot be created: see the registry's log.")
        return int(found["id"])

    def _ask(self, path: str, body: Mapping[str, str] | None = None) -> Mapping[str, Any] | None:
        """Return the answer, which has an id; None if there is no such subject or schema. Raise StartupError."""
        url = f"{str(self._options.registry).rstrip('/')}/subjects/{quote(self._options.value_subject, safe='')}{path}"
        # `check` of the options has seen that it is HTTP.
        request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), self._headers)  # noqa: S310
        try:
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                    status, content = int(answer.status), answer.read(MAX_ANSWER_BYTES)
            except urllib.error.HTTPError as error:
                status, content = error.code, error.read(MAX_ANSWER_BYTES)
        except (OSError, HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise StartupError(f"no answer from {self._where} ({why}): start it, or correct the address.") from error
        try:
            found: Any = json.loads(content)
        except ValueError:
            found = None
        if status == 200 and isinstance(found, dict) and isinstance(found.get("id"), int):
            return found
        code, message = (found.get("error_code"), found.get("message")) if isinstance(found, dict) else (None, None)
        if status == 404 and code in _NOT_FOUND:
            return None
        raise StartupError(self._why(status, code, " ".join(str(message or "no message").split())[:SHOWN]))

    def _why(self, status: int, code: object, message: str) -> str:
        said = f"({status}: {message})"
        if status in (401, 403):
            return (
                f"{self._where} refuses {self._user} for subject {self._options.value_subject} {said}: give "
                "--registry-user, and its password in --registry-password-file or KPROXY_REGISTRY_PASSWORD."
            )
        if status == 409:
            return (
                f"the schema of the values is not compatible with earlier ones of {self._subject} {said}: change the "
                "columns (--select, --value), give --value-schema, or change the subject's compatibility."
            )
        if code is None or status in (200, 404, 405):
            return (
                f"{self._where} is not a schema registry (answer: {status} for subject {self._options.value_subject}): "
                "name its base address, such as http://registry:8081, with Apicurio's /apis/ccompat/v7."
            )
        remedy = "correct --value-schema or the columns" if status == 422 else "see the registry's log"
        return f"{self._subject} does not take the schema of the values {said}: {remedy}."
