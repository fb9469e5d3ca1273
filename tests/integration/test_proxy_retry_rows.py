"""Every row of the retry table, on the wire: what is sent again, to what end, and whose batches may be.

The rows are taken from the table itself; one that is not spelt out here fails. All rows of a table run at once, each
with a client and a partition of its own, before a broker that says the same for ever.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest

from kproxy.routing import retry
from kproxy.routing.retry import CONNECTION_LOST, KAFKA, LEASED, NOT_WRITTEN, UNREADABLE, Conduct
from kproxy_codec.api_keys import FETCH, LIST_OFFSETS, PRODUCE
from tests.support.raw_client import batch, list_offsets_frame, produce_frame
from tests.support.running_proxy import RunningProxy, both_loops, running_proxy
from tests.support.scripted_upstream import Asked, ScriptedUpstream

ALL = frozenset({"plain", "idempotent", "transactional"})
KNOWN_AGAIN = frozenset({"idempotent"})
THRICE, A_SECOND, SOME_SECONDS = "three times", "for a second", "for some seconds"
ABSENT_BROKER = 99
# Long enough for more than three attempts wherever this runs.
SHORT_MS = 2500

RECORDS = {
    "plain": batch(producer_id=-1),
    "idempotent": batch(),
    "transactional": batch(is_transactional=True),
}


class Expected(NamedTuple):
    """How often a batch of `kinds` is tried, what the client gets in the end; other kinds are tried once."""

    tried: str
    final: int
    kinds: frozenset[str]


_REFUSED = {
    NOT_WRITTEN: Expected(THRICE, 6, ALL),
    6: Expected(THRICE, 6, ALL),
    100: Expected(THRICE, 100, ALL),
    5: Expected(A_SECOND, 5, ALL),
    19: Expected(A_SECOND, 19, ALL),
}
_UNKNOWN = dict.fromkeys((7, 13, 20, CONNECTION_LOST, UNREADABLE), Expected(SOME_SECONDS, 7, KNOWN_AGAIN))
_UNCLEAR = dict.fromkeys((3, 6, 56), Expected(SOME_SECONDS, 7, KNOWN_AGAIN))
EXPECTED: dict[str, dict[int, Expected]] = {
    "PRODUCE": {**_REFUSED, **_UNKNOWN},
    "PRODUCE_UNCLEAR": {**_REFUSED, **_UNKNOWN, **_UNCLEAR},
    "PRODUCE_REFUSED": {
        **_REFUSED,
        **_UNKNOWN,
        **_UNCLEAR,
        6: Expected(THRICE, 6, ALL),
        3: Expected(THRICE, 3, ALL),
    },
    "READ": {
        **dict.fromkeys((NOT_WRITTEN, 6, CONNECTION_LOST, UNREADABLE), Expected(THRICE, 6, ALL)),
        5: Expected(THRICE, 5, ALL),
    },
}
# Under which table an answer falls: brokers' conduct, acks, and the base offset that it has.
APPLIES: list[tuple[str, Conduct, int, int | None]] = [
    ("PRODUCE", LEASED, -1, 0),
    ("PRODUCE", LEASED, 1, -1),
    ("PRODUCE", KAFKA, 1, 0),
    ("PRODUCE_UNCLEAR", KAFKA, -1, 0),
    ("PRODUCE_REFUSED", KAFKA, -1, -1),
    ("READ", LEASED, 0, None),
]


def tables() -> dict[str, dict[int, retry.Row]]:
    """Whatever is a table of rows in the module."""
    return {
        name: value
        for name, value in vars(retry).items()
        if isinstance(value, dict) and value and all(isinstance(row, retry.Row) for row in value.values())
    }


def test_every_row_of_every_table_is_spelt_out_here() -> None:
    assert {name: set(rows) for name, rows in tables().items()} == {name: set(rows) for name, rows in EXPECTED.items()}


@pytest.mark.parametrize(("table", "conduct", "acks", "base_offset"), APPLIES)
def test_answers_fall_under_their_table(table: str, conduct: Conduct, acks: int, base_offset: int | None) -> None:
    for api_key in (FETCH, LIST_OFFSETS) if table == "READ" else (PRODUCE,):
        assert retry.rows_of(api_key, acks, conduct, base_offset) is tables()[table]
    if table == "PRODUCE_UNCLEAR":
        # What has no answer at all may have been appended.
        assert retry.rows_of(PRODUCE, acks, conduct, None) is tables()[table]


def says_for_ever(asked: Asked, base_offset: int | None) -> None:
    """The event that the partition's index names."""
    [(topic, event)] = asked.partitions
    if event == CONNECTION_LOST:
        asked.connection.abort()
    elif event == UNREADABLE:
        asked.answer(asked.header.correlation_id + 1)
    else:
        offset = {} if base_offset is None else {"base_offset": base_offset}
        asked.answer(results={(topic, event): {"error_code": event, **offset}})


async def follow(proxy: RunningProxy, upstream: ScriptedUpstream, table: str, event: int, kind: str, acks: int) -> None:
    expected = EXPECTED[table][event]
    topic_of_kind = {"plain": "p", "idempotent": "i", "transactional": "x"}[kind]
    client = await proxy.client()
    partitions = {topic_of_kind: [event]}
    if table == "READ":
        client.send(list_offsets_frame(partitions))
        answer = await client.answer(LIST_OFFSETS, 6)
    else:
        client.send(produce_frame(partitions, records=RECORDS[kind], acks=acks, timeout_ms=SHORT_MS))
        answer = await client.answer()
    what = f"{table} {event} {kind}"
    assert answer.codes == {(topic_of_kind, event): expected.final}, what
    if event == NOT_WRITTEN:
        # Each attempt asks for the owner anew.
        tried = sum(asked[:2] == (topic_of_kind, event) for asked in proxy.source.refreshed)
    else:
        tried = sum(asked.partitions == [(topic_of_kind, event)] for asked in upstream.log)
    if kind not in expected.kinds:
        assert tried == 1, what
    elif expected.tried == THRICE:
        assert tried == 3, what
    elif expected.tried == A_SECOND:
        assert 3 <= tried <= 5, what
    else:
        assert tried > 3, what


@pytest.mark.parametrize(
    ("table", "conduct", "acks", "base_offset"), APPLIES, ids=[f"{row[0]}-{n}" for n, row in enumerate(APPLIES)]
)
@both_loops
async def test_every_row_is_followed(table: str, conduct: Conduct, acks: int, base_offset: int | None) -> None:
    upstream = ScriptedUpstream(1, lambda asked: says_for_ever(asked, base_offset))
    absent = ScriptedUpstream(ABSENT_BROKER)
    async with running_proxy(upstream, absent) as proxy:
        await absent.stop_listening()
        proxy.context.conduct = conduct
        for topic in "pix":
            for event in EXPECTED[table]:
                proxy.own(ABSENT_BROKER if event == NOT_WRITTEN else 1, topic, [event])
        kinds = ["plain"] if table == "READ" else list(RECORDS)
        await asyncio.gather(
            *(follow(proxy, upstream, table, event, kind, acks) for event in EXPECTED[table] for kind in kinds)
        )
