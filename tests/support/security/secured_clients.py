"""Run unchanged clients that authenticate and write one record, and return the errors that their users see.

For OAUTHBEARER the password is the token.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import aiokafka  # type: ignore[import-untyped]
import aiokafka.abc  # type: ignore[import-untyped]
import confluent_kafka
import kafka
import kafka.errors
import kafka.net.sasl.oauth

from tests.support.brokers.kafka_jars import client_classpath, kafka_classpath
from tests.support.clients.java_client import run_java_client
from tests.support.clients.kafka_io import Record
from tests.support.security.sasl_client import USERS

OK = "ok"
_SECURITY = "org.apache.kafka.common.security"


def patience_s(mechanism: str | None) -> float:
    """How long a client tries. A client without SASL gets no error at a listener with SASL, and gives up by itself."""
    return 4.0 if mechanism is None else 40.0


def patience_ms(mechanism: str | None) -> int:
    return round(patience_s(mechanism) * 1000)


def librdkafka(bootstrap: str, topic: str, mechanism: str | None, name: str, password: str) -> str:
    """`ok`, or the names of the errors that its callbacks report."""
    seen: set[str] = set()
    settings: dict[str, Any] = {"bootstrap.servers": bootstrap, "log_level": 0}
    settings["message.timeout.ms"] = patience_ms(mechanism)
    settings["error_cb"] = lambda error: seen.add(str(error.name()))
    if mechanism is not None:
        settings |= {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": mechanism}
        if mechanism == "OAUTHBEARER":
            # librdkafka presents the token without checking it.
            settings["oauth_cb"] = lambda _: (password, time.time() + 600.0)
        else:
            settings |= {"sasl.username": name, "sasl.password": password}
    outcome: list[str] = []

    def delivered(error: Any, _: object) -> None:
        outcome.append(OK if error is None else str(error.name()))

    producer = confluent_kafka.Producer(settings)
    with suppress(confluent_kafka.KafkaException):
        producer.produce(topic, b"x", partition=0, on_delivery=delivered)
        deadline = time.monotonic() + patience_s(mechanism) + 2.0
        while not outcome and time.monotonic() < deadline and "_AUTHENTICATION" not in seen:
            producer.poll(0.1)
    producer.purge()
    return (
        OK if outcome == [OK] else ",".join(sorted((seen | set(outcome[:1])) - {"_ALL_BROKERS_DOWN", "_MSG_TIMED_OUT"}))
    )


class _KafkaPythonToken(kafka.net.sasl.oauth.AbstractTokenProvider):
    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def token(self) -> str:
        return self._text


class _AiokafkaToken(aiokafka.abc.AbstractTokenProvider):  # type: ignore[misc, no-any-unimported]
    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    async def token(self) -> str:
        return self._text


def kafka_python(bootstrap: str, topic: str, mechanism: str | None, name: str, password: str) -> str:
    """`ok`, or the name of the exception. It tries again after a refusal, until the time limit."""
    within = 20_000 if USERS.get(name) == password else 6_000
    settings: dict[str, Any] = {"bootstrap_servers": bootstrap, "max_block_ms": within, "delivery_timeout_ms": within}
    settings["bootstrap_timeout_ms"] = within
    settings |= {"request_timeout_ms": within // 2, "linger_ms": 0, "client_id": f"c-{uuid.uuid4().hex[:8]}"}
    if mechanism is not None:
        settings |= {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": mechanism}
        if mechanism == "OAUTHBEARER":
            settings["sasl_oauth_token_provider"] = _KafkaPythonToken(password)
        else:
            settings |= {"sasl_plain_username": name, "sasl_plain_password": password}
    producer = None
    try:
        producer = kafka.KafkaProducer(**settings)
        producer.send(topic, b"x", partition=0).get(within / 1000 + 2.0)
    except kafka.errors.KafkaError as error:
        return type(error).__name__
    finally:
        if producer is not None:
            producer.close(0)
    return OK


async def _aiokafka(settings: Mapping[str, Any], topic: str, within_s: float) -> str:
    producer = aiokafka.AIOKafkaProducer(**settings)
    try:
        async with asyncio.timeout(within_s):
            await producer.start()
            await producer.send_and_wait(topic, b"x", partition=0)
    except (aiokafka.errors.KafkaError, TimeoutError) as error:
        return type(error).__name__
    finally:
        await producer.stop()
    return OK


def aiokafka_client(bootstrap: str, topic: str, mechanism: str | None, name: str, password: str) -> str:
    """`ok`, or the name of the exception."""
    settings: dict[str, Any] = {"bootstrap_servers": bootstrap, "request_timeout_ms": patience_ms(mechanism) // 2}
    if mechanism is not None:
        settings |= {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": mechanism}
        if mechanism == "OAUTHBEARER":
            settings["sasl_oauth_token_provider"] = _AiokafkaToken(password)
        else:
            settings |= {"sasl_plain_username": name, "sasl_plain_password": password}
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    return asyncio.run(_aiokafka(settings, topic, patience_s(mechanism) + 2.0))


def java(bootstrap: str, topic: str, mechanism: str | None, name: str, password: str, version: str = "4.3.1") -> str:
    """`ok`, or the error that its callback reports."""
    within = patience_ms(mechanism)
    settings: dict[str, object] = {"bootstrap.servers": bootstrap, "max.block.ms": within}
    settings |= {"delivery.timeout.ms": within, "request.timeout.ms": within // 2, "linger.ms": 0}
    classpath = client_classpath(version)
    options: list[str] = []
    if mechanism is not None:
        settings |= {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": mechanism}
    if mechanism == "OAUTHBEARER":
        # The Java client reads the token from a file, and needs more jars for that.
        classpath = kafka_classpath()
        with NamedTemporaryFile("w", suffix=".jwt") as file:
            file.write(password)
            file.flush()
            url = Path(file.name).as_uri()
            settings["sasl.jaas.config"] = f"{_SECURITY}.oauthbearer.OAuthBearerLoginModule required;"
            handler = "OAuthBearerLoginCallbackHandler"
            settings["sasl.login.callback.handler.class"] = f"{_SECURITY}.oauthbearer.{handler}"
            settings["sasl.oauthbearer.token.endpoint.url"] = url
            settings["sasl.oauthbearer.jwt.retriever.class"] = f"{_SECURITY}.oauthbearer.FileJwtRetriever"
            options = [f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={url}"]
            # Its log would mix with its output.
            options.append("-Dorg.apache.logging.log4j.level=OFF")
            return _java_outcome(classpath, topic, settings, options)
    if mechanism is not None:
        kind = "plain.PlainLoginModule" if mechanism == "PLAIN" else "scram.ScramLoginModule"
        settings["sasl.jaas.config"] = f'{_SECURITY}.{kind} required username="{name}" password="{password}";'
    return _java_outcome(classpath, topic, settings, options)


def _java_outcome(classpath: str, topic: str, settings: Mapping[str, object], options: Sequence[str]) -> str:
    run = run_java_client(classpath, topic, [Record(None, b"x", 0, ())], settings, options=options)
    return OK if not run.errors else run.errors[0]


CLIENTS: Mapping[str, Callable[[str, str, str | None, str, str], str]] = {
    "librdkafka": librdkafka,
    "kafka-python": kafka_python,
    "aiokafka": aiokafka_client,
    "java": java,
}
