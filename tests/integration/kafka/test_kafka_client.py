"""Finding a broker that answers among some that do not."""

from __future__ import annotations

import time

import pytest

from kproxy.ownership import kafka_client
from kproxy.ownership.kafka_client import BrokerUnreachable, open_any
from tests.support.brokers.scripted_upstream import Asked, DeafListener, ScriptedUpstream

TIMEOUT_S = 240.0


def says_its_versions(asked: Asked) -> None:
    asked.answer_message(api_keys=[{"api_key": 3, "min_version": 0, "max_version": 12}])


async def test_first_broker_is_preferred() -> None:
    first = await ScriptedUpstream(1, says_its_versions).start()
    second = await ScriptedUpstream(2, says_its_versions).start()
    connection = await open_any([first.address, second.address], TIMEOUT_S)
    assert connection.address == first.address
    assert second.connections == []
    await connection.close()
    await first.stop()
    await second.stop()


async def test_hung_brokers_and_dials_are_not_awaited() -> None:
    hung = await ScriptedUpstream(1).start()
    healthy = await ScriptedUpstream(2, says_its_versions).start()
    with DeafListener() as deaf:
        began = time.monotonic()
        connection = await open_any([hung.address, deaf.address, hung.address, healthy.address], TIMEOUT_S)
        assert time.monotonic() - began < TIMEOUT_S / 4
    assert connection.address == healthy.address
    # The losers are closed, and each was asked once.
    assert len(hung.connections) == 1
    await hung.connections[0].until_closed()
    await connection.close()
    await hung.stop()
    await healthy.stop()


async def test_refused_dial_starts_the_next_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_client, "HEAD_START_S", TIMEOUT_S)
    gone, healthy = await ScriptedUpstream(1).start(), await ScriptedUpstream(2, says_its_versions).start()
    await gone.stop()
    began = time.monotonic()
    connection = await open_any([gone.address] * 2 + [healthy.address], TIMEOUT_S)
    assert time.monotonic() - began < TIMEOUT_S / 4
    await connection.close()
    await healthy.stop()


async def test_error_names_every_broker_and_its_reason() -> None:
    gone, hung = await ScriptedUpstream(1).start(), await ScriptedUpstream(2).start()
    await gone.stop()
    with pytest.raises(BrokerUnreachable) as caught:
        await open_any([gone.address, hung.address], 2.0)
    for address, why in ((gone.address, "cannot be reached"), (hung.address, "did not answer")):
        assert f"{address.host}:{address.port} {why}" in str(caught.value)
    with pytest.raises(BrokerUnreachable, match="no broker is known"):
        await open_any([], 0.3)
    await hung.connections[0].until_closed()
    await hung.stop()
