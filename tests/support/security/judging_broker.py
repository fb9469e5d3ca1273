"""Run a broker that authenticates by SASL and records the sender of each request, for forwarded identities.

It serves connections without SASL, which are the proxy's own, as `anonymous`. `passwords` and `tokens` decide about
credentials, unless `misbehaves` takes the request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

from kproxy_codec import control
from kproxy_codec.api_keys import API_VERSIONS, METADATA, PRODUCE, SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.error_codes import (
    ILLEGAL_SASL_STATE,
    NONE,
    SASL_AUTHENTICATION_FAILED,
    TOPIC_AUTHORIZATION_FAILED,
    UNSUPPORTED_SASL_MECHANISM,
)
from kproxy_codec.framing import client_id
from tests.support.brokers.scripted_upstream import (
    PROBE_CLIENT_ID,
    VERSIONS_CLIENT_ID,
    Asked,
    ScriptedUpstream,
    UpstreamConnection,
    introduction,
)
from tests.support.security.sasl_client import USERS

REFUSAL = "Authentication failed: Invalid username or password (says the broker)"
_INVALID_TOKEN = b'{"status":"invalid_token"}'


class JudgingBroker(ScriptedUpstream):
    """`may_write` maps users to writable topics; without it everybody may write to all."""

    def __init__(self, node_id: int) -> None:
        super().__init__(node_id)
        self.passwords = dict(USERS)
        self.tokens: dict[str, str] = {}
        self.mechanisms = ["PLAIN", "OAUTHBEARER"]
        self.lifetime_ms = 0
        self.may_write: Callable[[str, str], bool] = lambda name, topic: True
        self.misbehaves: Callable[[Asked], bool] = lambda asked: False
        # The message and version of each SaslAuthenticate, in order.
        self.presented: list[tuple[bytes, int]] = []
        self.names: dict[UpstreamConnection, str] = {}
        # The sender of each request: (name, API key); "" for the proxy itself.
        self.requests: list[tuple[str, int]] = []
        self._mechanism: dict[UpstreamConnection, str] = {}
        self._renewed_at: dict[UpstreamConnection, float] = {}
        self._is_told: set[UpstreamConnection] = set()

    def take(self, asked: Asked) -> None:
        key = asked.header.api_key
        is_own = client_id(asked.frame) in (PROBE_CLIENT_ID, VERSIONS_CLIENT_ID)
        if not is_own and self.misbehaves(asked):
            return
        if is_own and key != API_VERSIONS:
            super().take(asked)
        elif key == API_VERSIONS:
            if client_id(asked.frame) == PROBE_CLIENT_ID:
                super().take(asked)
            else:
                asked.connection.write(introduction(asked.header))
        elif key == SASL_HANDSHAKE:
            self._handshake(asked)
        elif key == SASL_AUTHENTICATE:
            self._authenticate(asked)
        else:
            self.serve(asked)

    def _handshake(self, asked: Asked) -> None:
        mechanism = control.decode_request(SASL_HANDSHAKE, asked.header.api_version, memoryview(asked.body)).mechanism
        if asked.connection in self.names:
            # As Kafka does, which accepts a renewal no earlier than a second after the last one began.
            now, last = time.monotonic(), self._renewed_at.get(asked.connection, -inf)
            self._renewed_at[asked.connection] = now
            if now - last < 1.0:
                asked.answer_message(error_code=ILLEGAL_SASL_STATE, mechanisms=[])
                return
        self._mechanism[asked.connection] = mechanism
        code = NONE if mechanism in self.mechanisms else UNSUPPORTED_SASL_MECHANISM
        asked.answer_message(error_code=code, mechanisms=self.mechanisms)

    def _authenticate(self, asked: Asked) -> None:
        version = asked.header.api_version
        message = bytes(control.decode_request(SASL_AUTHENTICATE, version, memoryview(asked.body)).auth_bytes)
        self.presented.append((message, version))
        lifetime = {"session_lifetime_ms": self.lifetime_ms} if version >= 1 else {}
        connection = asked.connection
        name = self._judge(connection, message)
        if name is not None and self.names.get(connection, name) != name:
            asked.answer_message(error_code=SASL_AUTHENTICATION_FAILED, error_message="another", auth_bytes=b"")
        elif name is not None:
            self.names[connection] = name
            asked.answer_message(error_code=NONE, error_message=None, auth_bytes=b"", **lifetime)
        elif self._mechanism[connection] == "OAUTHBEARER" and connection not in self._is_told:
            self._is_told.add(connection)
            asked.answer_message(error_code=NONE, error_message=None, auth_bytes=_INVALID_TOKEN, **lifetime)
        else:
            asked.answer_message(
                error_code=SASL_AUTHENTICATION_FAILED, error_message=REFUSAL, auth_bytes=b"", **lifetime
            )
            connection.close()

    def _judge(self, connection: UpstreamConnection, message: bytes) -> str | None:
        if self._mechanism[connection] == "PLAIN":
            _, name, password = message.decode().split("\x00")
            return name if self.passwords.get(name) == password else None
        token = message.decode().partition("auth=Bearer ")[2].partition("\x01")[0]
        return self.tokens.get(token)

    def serve(self, asked: Asked) -> None:
        """Answer every client."""
        key, name = asked.header.api_key, self.names.get(asked.connection, "")
        self.requests.append((name, key))
        self.log.append(asked)
        if key == PRODUCE:
            refused = {
                place: TOPIC_AUTHORIZATION_FAILED for place in asked.partitions if not self.may_write(name, place[0])
            }
            if asked.fields["acks"] != 0:
                asked.answer(results=refused)
        elif key == METADATA:
            topics = [{"error_code": 0, "name": f"of-{name}", "partitions": []}]
            brokers = [{"node_id": self.node_id, "host": "broker", "port": 1}]
            asked.answer_message(brokers=brokers, controller_id=self.node_id, cluster_id="c", topics=topics)
        else:
            asked.answer()
