"""A writer that fails makes its test fail: see tests/support/clients/steady_writers.py."""

from __future__ import annotations

import confluent_kafka
import pytest

from tests.support.clients.steady_writers import MODES, Writer, writing
from tests.support.processes.ports import free_port
from tests.support.waiting import wait_for


def writer(**settings: object) -> Writer:
    address = f"127.0.0.1:{free_port()}"
    return Writer("librdkafka", address, "t", 0, MODES["acks-all"], {"log_level": 0, **settings}, is_renewed=True)


def test_writer_exception_is_raised_by_checks() -> None:
    at_the_end, by_a_check = (pytest.raises(confluent_kafka.KafkaException, match="no_such_setting") for _ in range(2))
    with at_the_end, writing([writer(no_such_setting=1)]) as running, by_a_check:
        wait_for(running.check)


def test_failed_request_is_the_writers_problem() -> None:
    failing = writer(**{"message.timeout.ms": 50})
    with writing([failing]) as running:
        wait_for(lambda: running.check() or failing.problems)
    assert "_MSG_TIMED_OUT" in failing.problems[0]
    assert failing.acknowledged_at == []
