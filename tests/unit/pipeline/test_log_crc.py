"""Without crc32c, as on an executor that lacks it, batches are read but not reported as intact."""

from __future__ import annotations

import sys

import pytest

from kproxy.pipeline.audit.log_client import LogClient, LogReadFailed, Patience, TopicPartition
from kproxy.pipeline.audit.log_options import LogOptions, LogRange, read_options
from kproxy.pipeline.audit.log_source import LogDataSourceReader, LogPiece
from kproxy.routing.topology import Address
from kproxy_codec.fetch import PartitionFetched
from tests.support.wire.record_batches import build_batch

PIECE = LogPiece([LogRange(TopicPartition("t", 0), 0, 1, is_first=True)], [None])


class OneCorruptBatch(LogClient):
    """A cluster with one topic, whose only record has a changed last byte."""

    def __init__(self) -> None:
        super().__init__([Address("127.0.0.1", 1)], timeout_s=1, patience_s=1)

    def fetch(self, which: TopicPartition, offset: int, max_bytes: int, patience: Patience) -> PartitionFetched:
        batch = build_batch([b"value"])
        batch[-2] ^= 1
        return PartitionFetched(0, 0, 1, 0, None, batch if offset == 0 else b"")


def crc_ok(check: str, monkeypatch: pytest.MonkeyPatch) -> list[bool | None]:
    monkeypatch.setattr(LogOptions, "client", lambda options: OneCorruptBatch())
    options = read_options({"bootstrap": "127.0.0.1:1", "topics": "t", "checkCrc": check})
    return [ok for read in LogDataSourceReader(options).read(PIECE) for ok in read.column("crc_ok").to_pylist()]


@pytest.fixture
def without_crc32c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "crc32c", None)
    monkeypatch.delitem(sys.modules, "kproxy_codec.record_crc", raising=False)


def test_corrupt_batch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert crc_ok("auto", monkeypatch) == [False]


@pytest.mark.usefixtures("without_crc32c")
def test_missing_crc32c_leaves_batches_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert crc_ok("auto", monkeypatch) == [None]


@pytest.mark.usefixtures("without_crc32c")
def test_missing_crc32c_fails_a_requested_check(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LogReadFailed, match=r"^An executor has no crc32c"):
        crc_ok("true", monkeypatch)
