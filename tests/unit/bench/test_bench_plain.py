"""The computation of `bench.plain`'s figures, and the offsets of its brokers: no table would show a fault in them."""

from __future__ import annotations

from pathlib import Path
from struct import pack_into
from xml.etree import ElementTree

import pytest

from bench.fast_broker import FastBroker
from bench.load import MANY_PARTITIONS, VERSION, Shape, produce_frame
from bench.null_broker import NullBroker
from bench.plain import MEASURED
from bench.plain_figures import DIRECT, HAPROXY, KPROXY, Figures, Latency, Ratio, fit, percentile, ratio
from bench.plain_plots import write_plots
from kproxy_codec.framing import RESPONSE_CORRELATION_ID_OFFSET, ReceiveArena
from kproxy_codec.produce import PRODUCE_API


def test_ratios_are_computed_within_a_round() -> None:
    # Another process makes all times of the second round twice as long.
    assert ratio([20.0, 44.0, 30.0], [10.0, 20.0, 10.0]) == Ratio(of_least=2.0, lowest=2.0, median=2.2, highest=3.0)


def test_percentile_is_one_of_the_values() -> None:
    assert [percentile(range(1, 101), percent) for percent in (50, 99, 100)] == [50, 99, 100]
    assert [percentile([7.0], percent) for percent in (50, 99)] == [7.0, 7.0]
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0


def test_added_latency_is_relative_to_same_round() -> None:
    found = Figures({}, MEASURED, [], [], 2000)
    for times in (2, 4):
        for name, micros in ((DIRECT, 100), (KPROXY, 100 * times)):
            found.latency.setdefault(name, Latency()).add([micros * 1e-6] * 99 + [1.0])
    assert found.added(KPROXY, 50) == pytest.approx([100.0, 300.0])
    assert found.latency[KPROXY].of(99) == pytest.approx([200.0, 400.0])


def test_plots_are_one_svg_file_each(tmp_path: Path) -> None:
    found = Figures({}, MEASURED, [], [], 2000)
    for number, name in enumerate((DIRECT, HAPROXY, KPROXY, "<peer>"), 1):
        found.cpu[name] = {shape.name: [5.0 * number, 4.0, 700.0] for shape in MEASURED}
        found.latency[name] = Latency([90.0 * number], [1_000.0])
    written = write_plots(found, tmp_path)
    assert [path.name for path in written] == ["plain-cpu.svg", "plain-latency.svg", "plain-ratio.svg"]
    for path in written:
        texts = [text.text for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
        assert {KPROXY, "<peer>"} <= set(texts)


def test_fit_recovers_the_costs_of_the_times() -> None:
    sizes = [shape.partitions * shape.batch_bytes for shape in MEASURED]
    brokers = [min(3, shape.partitions) for shape in MEASURED]
    costs = [
        5 + 2 * shape.partitions + 10 * broker + 300 * size / 1e6
        for shape, size, broker in zip(MEASURED, sizes, brokers, strict=True)
    ]
    found = fit(MEASURED, sizes, brokers, costs)
    assert found[:4] == pytest.approx((5, 2, 10, 300))
    assert found.errors == pytest.approx([0] * len(MEASURED), abs=1e-9)
    assert found.cpu_us(10, 3, 1.0) == pytest.approx(355)


def base_offsets(broker: FastBroker, frame: bytes, correlation_id: int) -> list[int]:
    """The base offsets of a request's partitions in the broker's successful answer."""
    asked = bytearray(frame)
    pack_into(">i", asked, 8, correlation_id)
    answer = bytearray(broker.answer(memoryview(asked)))
    assert int.from_bytes(answer[:4], "big") == len(answer) - 4
    place = RESPONSE_CORRELATION_ID_OFFSET
    assert int.from_bytes(answer[place : place + 4], "big") == correlation_id
    found = []
    for topic in PRODUCE_API.parse_response(memoryview(answer), VERSION).topics:
        assert not any(topic.error_codes)
        found += [int.from_bytes(answer[start + 6 : start + 14], "big") for start in topic.starts]
    return found


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> FastBroker:
    monkeypatch.setattr(FastBroker, "known", {})
    monkeypatch.setattr(FastBroker, "next_offset", 0)
    return FastBroker(ReceiveArena())


def test_fast_broker_assigns_no_offset_twice(broker: FastBroker) -> None:
    ten = produce_frame(MANY_PARTITIONS[0])
    records = MANY_PARTITIONS[0].records
    for number in range(3):
        assert base_offsets(broker, ten, number + 7) == [number * records] * 10
    # Requests of other shapes continue each partition's offsets.
    one = produce_frame(Shape("", 1, 1 << 10, 0))
    others = produce_frame(MANY_PARTITIONS[0], first=10)
    assert base_offsets(broker, one, 1) == [3 * records]
    assert base_offsets(broker, others, 2) == [4 * records] * 10
    assert base_offsets(broker, ten, 3) == [5 * records] * 10
    assert len(broker.known) == 3


def test_null_broker_orders_partitions_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NullBroker, "answers", {})
    monkeypatch.setattr(NullBroker, "end_offsets", {})
    broker, records = NullBroker(ReceiveArena()), MANY_PARTITIONS[0].records
    broker.answer(memoryview(produce_frame(Shape("", 1, 1 << 10, 0), first=3)))
    for number in range(2):
        answer = memoryview(bytearray(broker.answer(memoryview(produce_frame(MANY_PARTITIONS[0])))))
        (topic,) = PRODUCE_API.parse_response(answer, VERSION).topics
        offsets = [int.from_bytes(answer[start + 6 : start + 14], "big") for start in topic.starts]
        assert topic.partitions != sorted(topic.partitions)
        assert dict(zip(topic.partitions, offsets, strict=True)) == {
            index: (number + (index == 3)) * records for index in range(10)
        }
