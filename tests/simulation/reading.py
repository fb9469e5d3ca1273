"""Print the lines of a world's transcript in readable form."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from tests.simulation import wire

_NAMES = {wire.PRODUCE: "Produce", wire.FETCH: "Fetch", wire.LIST_OFFSETS: "ListOffsets", wire.API_VERSIONS: "Versions"}


def by_heading(lines: Iterable[str]) -> dict[str, list[str]]:
    """The parts of a transcript."""
    parts: dict[str, list[str]] = {}
    heading = ""
    for line in lines:
        if line.startswith("  "):
            parts[heading].append(line)
        else:
            heading = line
            parts[heading] = []
    return parts


def time_of(line: str) -> float:
    """The send time in simulated seconds; later than all others for a line without a time."""
    at = line.strip().partition(" ")[0]
    return float(at) if at.replace(".", "", 1).isdigit() else inf


def readable(line: str) -> str:
    """The lines sent in one moment, with its time; any other line as it is."""
    at, _, sent = line.strip().partition(" ")
    if not line.startswith("  ") or not sent:
        return line
    try:
        data = bytes.fromhex(sent)
    except ValueError:
        return line
    told, place = [], 0
    while place < len(data):
        end = place + 4 + int.from_bytes(data[place : place + 4], "big")
        told.append(_frame(data[place:end]))
        place = end
    return f"{at} {'; '.join(told)}"


def _frame(frame: bytes) -> str:
    """Describe a request; or an answer by its bytes, because it does not name its version."""
    try:
        key, version, correlation_id, _ = wire.head_of(frame)
        if key == wire.PRODUCE and version in range(3, 14):
            request = wire.read_produce_request(frame)
            batches = [
                f"{topic.decode()}/{index} {_batch(wire.batch_id_of(records))}"
                for topic, entries in request.topics
                for index, records in entries
            ]
            return f"Produce v{version} {correlation_id} acks {request.acks} [{', '.join(batches)}]"
        if key in _NAMES and len(frame) > 14:
            return f"{_NAMES[key]} v{version} {correlation_id}"
    except (ValueError, IndexError):
        # The frame is an answer.
        pass
    return f"answer to {int.from_bytes(frame[4:8], 'big', signed=True)}: {frame[8:].hex()}"


def _batch(batch_id: int) -> str:
    return f"batch {batch_id & 0xFFFFFFF} of client {batch_id >> 40}"
