"""The evaluation of `bench.plain`'s measurements, its brokers, and its loop at a fixed rate."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
from pathlib import Path
from struct import pack_into
from xml.etree import ElementTree

import pytest
from rich.console import Console

from bench.fast_broker import FastBroker
from bench.latency import TooSlow, latencies
from bench.load import MANY_PARTITIONS, SHAPES, VERSION, Shape, produce_frame
from bench.null_broker import NullBroker
from bench.plain import MEASURED, MIN_WIDTH, plain
from bench.plain_figures import (
    DIRECT,
    HAPROXY,
    KPROXY,
    NO_HAPROXY,
    Figures,
    Latency,
    Peer,
    Ratio,
    as_json,
    fit,
    fit_text,
    parse_peer,
    percentile,
    ratio,
    tables,
)
from bench.plain_plots import write_plots
from bench.quick import OWNERS, haproxy
from kproxy_codec.framing import RESPONSE_CORRELATION_ID_OFFSET, ReceiveArena
from kproxy_codec.produce import PRODUCE_API


def figures(*, with_haproxy: bool = True) -> Figures:
    """Of two rounds, in which kproxy takes twice, and then four times, what haproxy does."""
    machine = {"cpu": "some", "cores": 2, "system": "Linux", "python": "3.11", "load_before": (0.5, 0.5, 0.5)}
    found = Figures(
        machine, MEASURED, [shape.partitions * shape.batch_bytes for shape in MEASURED], [1] * len(MEASURED), 2000
    )
    for times in (2.0, 4.0):
        for number, shape in enumerate(MEASURED, 1):
            if with_haproxy:
                found.add_run(HAPROXY, shape.name, 10.0 * number, 1000.0)
            found.add_run(KPROXY, shape.name, 10.0 * number * times, 500.0)
            found.add_run("other", shape.name, 10.0 * number, 700.0)
            found.turns.setdefault(shape.name, []).append(times)
        for name, micros in ((DIRECT, 100), (KPROXY, 100 * times)):
            found.latency.setdefault(name, Latency()).add([micros * 1e-6] * 99 + [1.0])
        found.turns.setdefault(found.paced, []).append(times)
    return found


def printed(found: Figures) -> str:
    console = Console(file=io.StringIO(), width=MIN_WIDTH)
    for heading, table in tables(found):
        console.print(heading)
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_shapes_are_measured_and_have_owners() -> None:
    assert [(shape.partitions, shape.batch_bytes) for shape in MEASURED] == [
        (1, 1 << 10),
        (1, 16 << 10),
        (3, 16 << 10),
        (10, 16 << 10),
        (1, 1_000_000),
        (10, 1 << 10),
        (100, 100),
        (100, 100),
    ]
    assert (*SHAPES, *MANY_PARTITIONS) == MEASURED[:-1]
    (owners,) = OWNERS.values()
    assert max(shape.partitions for shape in MEASURED) <= len(owners)
    assert set(owners[:3]) == {1, 2, 3}


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("envoy=127.0.0.1:9092,4711", Peer("envoy", "127.0.0.1", 9092, 4711)),
        ("a=b=localhost:1,2", Peer("a", "b=localhost", 1, 2)),
        ("six=[::1]:9092,1", Peer("six", "::1", 9092, 1)),
    ],
)
def test_peer_has_name_address_and_process(text: str, peer: Peer) -> None:
    assert parse_peer(text) == peer


@pytest.mark.parametrize(
    "text",
    [
        *("", "envoy", "envoy=127.0.0.1:9092", "=h:1,2", "e=:1,2", "e=h,2", "e=h:x,2", "e=h:1,", "e=h:0,2"),
        *("e=h:65536,2", "e=h:1,0", "e=h:1,-2", "e=h:1,2147483648"),
    ],
)
def test_invalid_peer_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a peer is given as name=host:port,pid, not as"):
        parse_peer(text)


@pytest.mark.parametrize("name", [DIRECT, HAPROXY, KPROXY])
def test_peer_cannot_use_name_of_another_row(name: str) -> None:
    with pytest.raises(ValueError, match="cannot have the name"):
        parse_peer(f"{name}=h:1,2")


def test_ratios_are_taken_within_a_round() -> None:
    # A neighbour doubles all times of the second round.
    assert ratio([20.0, 44.0, 30.0], [10.0, 20.0, 10.0]) == Ratio(of_least=2.0, lowest=2.0, median=2.2, highest=3.0)


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile(range(1, 101), percent) for percent in (50, 99, 100)] == [50, 99, 100]
    assert [percentile([7.0], percent) for percent in (50, 99)] == [7.0, 7.0]
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0


def test_added_latency_is_relative_to_same_round() -> None:
    assert figures().added(KPROXY, 50) == pytest.approx([100.0, 300.0])
    assert figures().latency[KPROXY].of(99) == pytest.approx([200.0, 400.0])


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
    assert "≈ 5.0 + 2.00 × partitions + 10.0 × brokers + 300 × MB" in fit_text(found)
    assert "off by 0 % at most" in fit_text(found)


def test_fit_reports_its_error() -> None:
    found = fit(MEASURED[:-1], [1000] * 7, [1] * 7, [10, 30, 10, 10, 10, 10, 10])
    # Two requests of one partition and one size differ: one is estimated too low, the other too high.
    assert max(map(abs, found.errors)) > 0.3


def test_tables_have_contestant_rows_and_shape_columns() -> None:
    text = printed(figures())
    for shape in MEASURED:
        assert shape.name in text
    assert "│ kproxy" in text
    assert "30.0│" in text
    assert "(20.0–40.0)" in text
    assert "3.00│" in text
    assert "(2.00–4.00)" in text
    assert "│ other" in text
    assert "(1.00–1.00)" in text
    assert "2,000 req/s" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 136


def test_large_times_fit_as_well() -> None:
    found = figures()
    found.cpu[KPROXY]["1 × 1 MB"] = [1055.44, 1068.15]
    found.cpu[KPROXY]["10 × 16 KiB"] = [124.94, 968.15]
    text = printed(found)
    assert "(1,055–1,068)" in text
    assert "(124.9–968.1)" in text
    assert "…" not in text


def test_missing_haproxy_omits_the_ratio_table() -> None:
    found = figures(with_haproxy=False)
    assert len(tables(found)) == 3
    assert "× haproxy" not in printed(found)
    assert as_json(found)["contestants"][KPROXY]["1 × 1 KiB"]["times_haproxy"] is None
    assert "show nothing about ratios" in NO_HAPROXY
    assert "apt-get install haproxy" in NO_HAPROXY


def test_json_has_every_round_and_table_values() -> None:
    read = json.loads(json.dumps(as_json(figures())))
    assert set(read) == {
        *("format", "machine", "connections", "in_flight", "shapes", "contestants", "latency", "longest_turn_ms", "fit")
    }
    assert [shape["name"] for shape in read["shapes"]] == [shape.name for shape in MEASURED]
    assert read["contestants"][KPROXY]["1 × 16 KiB"] == {
        "cpu_us": {"rounds": [40.0, 80.0], "least": 40.0, "median": 60.0},
        "requests_per_second": [500.0, 500.0],
        "times_haproxy": {"of_least": 2.0, "lowest": 2.0, "median": 3.0, "highest": 4.0},
    }
    latency = read["latency"]["contestants"][KPROXY]["p50"]
    assert latency["rounds_us"] == pytest.approx([200.0, 400.0])
    assert latency["added_median_us"] == pytest.approx(200.0)
    assert read["longest_turn_ms"]["2,000 req/s"] == {"rounds": [2.0, 4.0], "highest": 4.0}
    assert len(read["fit"]["errors"]) == len(MEASURED)


@pytest.mark.parametrize("with_haproxy", [True, False])
def test_plots_are_whole_svg_files_with_colours(tmp_path: Path, with_haproxy: bool) -> None:
    pytest.importorskip("matplotlib")
    written = write_plots(figures(with_haproxy=with_haproxy), tmp_path / "plots")
    assert [path.name for path in written] == [
        "plain-cpu.svg",
        "plain-latency.svg",
        *(["plain-ratio.svg"] if with_haproxy else []),
    ]
    for path in written:
        text = path.read_text(encoding="utf-8")
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert {"width", "height", "viewBox"} <= set(root.attrib)
        style = root.findtext("{http://www.w3.org/2000/svg}style") or ""
        for used in ("--ink", "--owner-0", "--line"):
            assert f"var({used})" in text
            # For light pages and for dark ones.
            assert style.count(f"{used}:") == 2
        drawn = "".join(root.itertext())
        assert "kproxy" in drawn
        assert "$" not in drawn
        assert "http://" not in text.replace("http://www.w3.org/", "")


def test_the_same_figures_make_the_same_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, other = (write_plots(figures(), tmp_path / name) for name in ("one", "other"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


def base_offsets(broker: FastBroker, frame: bytes, correlation_id: int) -> list[int]:
    """Of a request's partitions, when the broker has answered it with success."""
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
    # Another shape to the same partitions, and to others.
    one = produce_frame(Shape("", 1, 1 << 10, 0))
    others = produce_frame(MANY_PARTITIONS[0], first=10)
    assert base_offsets(broker, one, 1) == [3 * records]
    assert base_offsets(broker, others, 2) == [4 * records] * 10
    assert base_offsets(broker, ten, 3) == [5 * records] * 10
    assert len(broker.known) == 3


def test_null_broker_orders_partitions_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_the_fast_broker_does_not_answer_acks_0(broker: FastBroker) -> None:
    frame = produce_frame(SHAPES[0], acks=0)
    assert [broker.answer(memoryview(frame)) for _ in range(2)] == [b"", b""]


class Server:
    """Answers each request by four bytes of its own, or not at all."""

    def __init__(self, *, answers: bool) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._answers = answers
        self.taken = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # Requests of ten bytes; the first five of a connection are always answered.
        taken = 0
        while True:
            try:
                read = connection.recv(10, socket.MSG_WAITALL)
            except OSError:
                return
            if not read:
                return
            taken += 1
            self.taken += 1
            if self._answers or taken <= 5:
                connection.sendall(read[:8])

    def close(self) -> None:
        self._listener.close()
        for connection in self._open:
            connection.close()


FRAME = b"\0\0\0\x04" + b"abcdef"


def test_every_fixed_rate_request_has_a_latency() -> None:
    server = Server(answers=True)
    try:
        found = latencies("127.0.0.1", server.port, FRAME, 200, 0.3)
    finally:
        server.close()
    assert len(found) == 60
    assert all(0 < each < 5 for each in found)
    assert server.taken == 60 + 8 * 5


def test_proxy_that_does_not_answer_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.latency.MAX_UNANSWERED", 20)
    server = Server(answers=False)
    try:
        with pytest.raises(TooSlow, match="21 requests are unanswered at 200 requests a second"):
            latencies("127.0.0.1", server.port, FRAME, 200, 1.0)
    finally:
        server.close()


def test_haproxy_that_is_not_installed_is_no_contestant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with haproxy(1, tmp_path) as found:
        assert found is None


def test_incomplete_peer_is_reported_before_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console(file=io.StringIO())
    with pytest.raises(SystemExit, match="there is no process 2147483647, which --peer names for ghost"):
        plain(console, 1, [Peer("ghost", "127.0.0.1", 1, 2147483647)])
    monkeypatch.setattr("bench.plain.START_TIMEOUT_S", 0.0)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(SystemExit, match=f"deaf does not listen at 127.0.0.1:{port}"):
            plain(console, 1, [Peer("deaf", "127.0.0.1", port, os.getpid())])
