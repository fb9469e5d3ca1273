"""The mirror against a real etcd: no change is lost from load to watch, over breaks, compaction, fragments, silence."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient, EtcdUnavailable, PrefixMirror, Snapshot, WatchEvent
from kproxy.etcd import mirror as mirror_module
from kproxy.etcd.messages import Pages
from kproxy.etcd.mirror import MirrorState, WatchStream
from tests.support.etcd.embedded import Relay, compact, connected, own_etcd, put_many, running
from tests.support.waiting import PATIENCE_S, eventually


class Copy:
    """A listener that keeps its events, and checks the promised order."""

    def __init__(self, *prefixes: str) -> None:
        self.kvs: dict[str, tuple[bytes, int]] = {}
        self.events: list[WatchEvent] = []
        self.snapshots: list[int] = []
        self.batches: list[tuple[int, int, int]] = []
        self.restored = 0
        self._last = dict.fromkeys(prefixes, 0)
        self._told = dict.fromkeys(prefixes, 0)

    def on_restored(self) -> None:
        self.restored += 1

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self.kvs = {kv.key: (kv.value, kv.mod_revision) for kv in snapshot.kvs}
        self.snapshots.append(snapshot.revision)
        for prefix in self._last:
            self._last[prefix] = self._told[prefix] = snapshot.revision

    def on_events(self, events: list[WatchEvent], revision: int) -> None:
        [prefix] = {prefix for prefix in self._last for event in events if event.kv.key.startswith(prefix)}
        self.events += events
        for event in events:
            assert event.kv.mod_revision >= self._last[prefix], "never back in time"
            assert event.kv.mod_revision > self._told[prefix], "never again what was said to be complete"
            self._last[prefix] = event.kv.mod_revision
            if event.deleted:
                self.kvs.pop(event.kv.key, None)
            else:
                self.kvs[event.kv.key] = (event.kv.value, event.kv.mod_revision)
        assert revision >= self._told[prefix]
        self._told[prefix] = revision
        self.batches.append((len(events), events[-1].kv.mod_revision, revision))


@asynccontextmanager
async def mirrored(client: EtcdClient, *prefixes: str, **options: Any) -> AsyncIterator[tuple[PrefixMirror, Copy]]:
    """A mirror that has loaded these prefixes, and its listener."""
    copy = Copy(*prefixes, *options.get("keys", ()))
    mirror = PrefixMirror(client, prefixes, copy, **options)
    async with running(mirror.run()):
        await mirror.wait_synced()
        yield mirror, copy


@asynccontextmanager
async def relayed(endpoint: str, *prefixes: str, **options: Any) -> AsyncIterator[tuple[Relay, PrefixMirror, Copy]]:
    """As `mirrored`, through a relay."""
    async with (
        Relay(endpoint) as relay,
        connected(EtcdClient([relay.endpoint], timeout_s=3)) as client,
        mirrored(client, *prefixes, **options) as (mirror, copy),
    ):
        yield relay, mirror, copy


async def content(client: EtcdClient, *prefixes: str) -> dict[str, tuple[bytes, int]]:
    found = [kv for prefix in prefixes for kv in (await client.get_prefix(prefix)).kvs]
    return {kv.key: (kv.value, kv.mod_revision) for kv in found}


async def test_snapshot_comes_first_and_changes_follow(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    ours, other = f"{etcd_prefix}/ours/", f"{etcd_prefix}/other/"
    await etcd_client.put(f"{ours}a", b"1")
    async with mirrored(etcd_client, ours) as (_, copy):
        assert list(copy.kvs) == [f"{ours}a"]
        await etcd_client.put(f"{ours}b", b"2")
        await etcd_client.put(f"{other}c", b"3")
        await etcd_client.delete(f"{ours}a")
        last = await etcd_client.put(f"{ours}b", b"4")
        await eventually(lambda: copy.kvs == {f"{ours}b": (b"4", last)})
        assert len(copy.snapshots) == 1


async def test_one_key_is_mirrored_without_its_neighbours(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    key, prefix = f"{etcd_prefix}/one", f"{etcd_prefix}/ours/"
    neighbours = [f"{key}2", f"{key}/below"]
    await put_many(etcd_client, [(each, b"before") for each in (key, *neighbours)])
    async with mirrored(etcd_client, prefix, keys=[key]) as (_, copy):
        assert set(copy.kvs) == {key}
        await put_many(etcd_client, [(each, b"after") for each in (*neighbours, key, f"{prefix}a")])
        wanted = {key: b"after", f"{prefix}a": b"after"}
        await eventually(lambda: {each: value for each, (value, _) in copy.kvs.items()} == wanted)
        assert len(copy.batches) == 2
        await etcd_client.delete(key)
        await eventually(lambda: set(copy.kvs) == {f"{prefix}a"})


# Puts the keys prefix + "0", "1" … in order; arguments: endpoint, prefix, count.
PUT_ONE_BY_ONE = """
import asyncio, sys
from kproxy.etcd import EtcdClient
async def main():
    client = EtcdClient([sys.argv[1]])
    await client.connect()
    for n in range(int(sys.argv[3])):
        await client.put(sys.argv[2] + str(n), b"x" * 150)
    await client.close()
asyncio.run(main())
"""


async def test_busy_loop_gets_changes_soon(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    changes, turns = 800, 0

    def turn() -> None:
        nonlocal turns, burning
        turns += 1
        time.sleep(0.002)
        burning = loop.call_soon(turn)

    async with mirrored(etcd_client, etcd_prefix) as (_, copy):
        await asyncio.sleep(0.1)
        command = [sys.executable, "-c", PUT_ONE_BY_ONE, etcd_client.endpoints, f"{etcd_prefix}/", str(changes)]
        # The loop is blocked meanwhile.
        subprocess.run(command, check=True, timeout=PATIENCE_S)
        loop = asyncio.get_running_loop()
        burning = loop.call_soon(turn)
        await eventually(lambda: len(copy.events) == changes)
        burning.cancel()
    print(f"{turns} turns, {len(copy.batches)} messages")
    assert turns < 2 * changes, "five for each change, if nothing were read ahead, and etcd combined nothing"


async def test_change_between_load_and_watch_is_seen(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    first, second = f"{etcd_prefix}/1/", f"{etcd_prefix}/2/"

    class Meddling(EtcdClient):
        """A client whose every answer is preceded by changes of both prefixes."""

        reads = 0

        async def get_prefix(self, prefix: str, *, revision: int = 0, into: Pages | None = None) -> Snapshot:
            snapshot = await super().get_prefix(prefix, revision=revision, into=into)
            self.reads += 1
            for each in (first, second):
                await self.put(f"{each}during-{self.reads}", b"")
                await self.delete(f"{each}old")
            return snapshot

    for each in (first, second):
        await etcd_client.put(f"{each}old", b"")
    async with (
        connected(Meddling(etcd_client.endpoints.split(","))) as client,
        mirrored(client, first, second) as (_, copy),
    ):
        assert set(copy.kvs) >= {f"{first}old", f"{second}old"}, "both prefixes are read at one revision"
        wanted = {f"{each}during-{n}" for each in (first, second) for n in (1, 2)}
        await eventually(lambda: set(copy.kvs) == wanted)


async def test_changes_during_disconnection_arrive_afterwards(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    prefix = f"{etcd_prefix}/"
    async with relayed(etcd_client.endpoints, prefix) as (relay, mirror, copy):
        await eventually(lambda: mirror.state is MirrorState.WATCHING)
        await relay.shut()
        await eventually(lambda: mirror.state is MirrorState.RESUMING)
        await put_many(etcd_client, [(f"{prefix}{n}", b"x") for n in range(50)])
        await asyncio.sleep(0.2)
        assert copy.kvs == {}
        assert isinstance(mirror.last_error, EtcdUnavailable)
        await relay.open()
        await eventually(lambda: len(copy.kvs) == 50)
        assert len(copy.snapshots) == 1
        await eventually(lambda: mirror.last_error is None)


async def test_compaction_during_disconnection_causes_reload(tmp_path: Path) -> None:
    async with own_etcd(tmp_path) as (server, writer):
        await put_many(writer, [(f"/a/{n}", b"old") for n in range(10)])
        async with relayed(server.endpoint, "/a/", "/b/") as (relay, _, copy):
            await relay.shut()
            for n in range(5):
                await writer.delete(f"/a/{n}")
                revision = await writer.put(f"/b/{n}", b"new")
            await compact(writer, revision)
            await relay.open()
            final = await content(writer, "/a/", "/b/")
            await eventually(lambda: copy.kvs == final)
            assert len(copy.snapshots) == 2
            assert copy.restored == 0, "compaction is not a restore"
            # It then continues to watch.
            await writer.put("/a/after", b"")
            await eventually(lambda: "/a/after" in copy.kvs)
            assert len(copy.snapshots) == 2


LONG = "t" * 200
FRAGMENTS = ("--max-request-bytes", "65536")


async def lease_with_many_keys(client: EtcdClient, prefix: str, count: int) -> int:
    """etcd fragments above its request limit + 512 KiB: these keys' deletion at one revision is over a megabyte."""
    lease = await client.lease_grant(60)
    await put_many(client, [(f"{prefix}{LONG}/{n}", b"1") for n in range(count)], lease.lease_id)
    return lease.lease_id


async def test_fragmented_revision_is_seen_after_last_fragment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fragments: list[bool] = []

    class Recording(WatchStream):
        async def read(self, timeout_s: float) -> Any | None:
            message = await super().read(timeout_s)
            if message is not None and message.events:
                fragments.append(message.fragment)
            return message

    monkeypatch.setattr(mirror_module, "WatchStream", Recording)
    async with own_etcd(tmp_path, extra_arguments=FRAGMENTS) as (_, client):
        lease_id = await lease_with_many_keys(client, "/a/", 5000)
        async with mirrored(client, "/a/", fragments=True) as (_, copy):
            assert len(copy.kvs) == 5000
            await client.lease_revoke(lease_id)
            await eventually(lambda: copy.kvs == {})
            assert fragments[:-1], "etcd sent it in one piece: this test has nothing to show"
            assert fragments == [True] * (len(fragments) - 1) + [False]
            [loaded] = copy.snapshots
            *before, last = copy.batches
            assert all(size <= mirror_module.CHUNK_EVENTS for size, _, _ in copy.batches)
            assert {seen for _, _, seen in before} == {loaded}
            assert last[2] == last[1] > loaded


async def test_end_of_large_lease_arrives_in_small_portions(tmp_path: Path) -> None:
    async with own_etcd(tmp_path) as (_, client):
        lease = await client.lease_grant(60)
        keys = [f"/a/topic-{n // 1000}/{n % 1000}" for n in range(40_000)]
        await put_many(client, [(key, b"1") for key in keys], lease.lease_id)
        async with mirrored(client, "/a/") as (_, copy):
            assert len(copy.kvs) == 40_000
            await client.lease_revoke(lease.lease_id)
            # If fragmented, etcd 3.5 would take 6 s for this.
            await eventually(lambda: copy.kvs == {})
            assert len(copy.snapshots) == 1
            assert {size for size, _, _ in copy.batches} == {mirror_module.CHUNK_EVENTS}
            *before, last = copy.batches
            assert {seen for _, _, seen in before} == {copy.snapshots[0]}
            assert last[2] == last[1]


async def test_revision_too_large_for_message_causes_reload(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    prefix = f"{etcd_prefix}/"
    async with connected(EtcdClient(etcd_client.endpoints.split(","), max_message_bytes=100_000)) as client:
        lease_id = await lease_with_many_keys(client, prefix, 1000)
        await client.put(f"{prefix}kept", b"")
        async with mirrored(client, prefix) as (_, copy):
            assert len(copy.kvs) == 1001
            await client.lease_revoke(lease_id)
            await eventually(lambda: list(copy.kvs) == [f"{prefix}kept"])
            assert len(copy.snapshots) == 2
            assert copy.restored == 0
            await client.put(f"{prefix}after", b"")
            await eventually(lambda: f"{prefix}after" in copy.kvs)
            assert len(copy.snapshots) == 2


class BreakingOnce(WatchStream):
    """A stream that breaks once, right after the first message for which `after` holds."""

    after: Callable[[Any], bool]
    broken = False

    async def read(self, timeout_s: float) -> Any | None:
        if getattr(self, "breaks_now", False):
            raise EtcdUnavailable("the connection broke here")
        message = await super().read(timeout_s)
        if message is not None and type(self).after(message) and not type(self).broken:
            type(self).broken = self.breaks_now = True
        return message


def breaking_once(monkeypatch: pytest.MonkeyPatch, after: Callable[[Any], bool]) -> type[BreakingOnce]:
    stream = type("Breaking", (BreakingOnce,), {"after": staticmethod(after)})
    monkeypatch.setattr(mirror_module, "WatchStream", stream)
    return stream


async def test_break_between_fragments_repeats_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = breaking_once(monkeypatch, lambda message: message.fragment)
    async with own_etcd(tmp_path, extra_arguments=FRAGMENTS) as (_, client):
        lease_id = await lease_with_many_keys(client, "/a/", 5000)
        async with mirrored(client, "/a/", fragments=True) as (_, copy):
            await client.lease_revoke(lease_id)
            await eventually(lambda: copy.kvs == {})
            assert stream.broken
            assert sum(size for size, _, _ in copy.batches) > 5000
            assert len(copy.snapshots) == 1


@pytest.mark.parametrize(
    ("value_bytes", "changes", "after"),
    [
        pytest.param(20_000, 60, lambda message: message.fragment, id="fragments of many revisions"),
        # etcd sends at most 1,000 revisions in one message, under a header that names the newest of all.
        pytest.param(1, 1500, lambda message: len(message.events) > 1, id="more revisions than one message holds"),
    ],
)
async def test_break_while_catching_up_loses_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    value_bytes: int,
    changes: int,
    after: Callable[[Any], bool],
) -> None:
    stream = breaking_once(monkeypatch, after)
    async with (
        own_etcd(tmp_path, extra_arguments=FRAGMENTS) as (server, writer),
        relayed(server.endpoint, "/a/", fragments=True) as (relay, _, copy),
    ):
        await relay.shut()
        for n in range(changes):
            await writer.put(f"/a/{n}", bytes(value_bytes))
        final = await content(writer, "/a/")
        await relay.open()
        await eventually(lambda: copy.kvs == final)
        assert stream.broken
        assert len(copy.snapshots) == 1


async def test_watch_that_goes_quiet_is_replaced(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    prefix = f"{etcd_prefix}/"
    times = {"progress_interval_s": 0.1, "quiet_limit_s": 0.5}
    async with relayed(etcd_client.endpoints, prefix, **times) as (relay, mirror, copy):
        await eventually(lambda: mirror.state is MirrorState.WATCHING)
        relay.freeze()
        await etcd_client.put(f"{prefix}a", b"")
        await eventually(lambda: mirror.state is MirrorState.RESUMING, what="silence is noticed")
        # The connection for calls is also frozen; gRPC's own ping would end it in some seconds.
        await relay.cut()
        await eventually(lambda: f"{prefix}a" in copy.kvs)


async def test_progress_moves_quiet_prefix_past_compaction(tmp_path: Path) -> None:
    arguments = ("--experimental-watch-progress-notify-interval", "200ms")
    async with (
        own_etcd(tmp_path, extra_arguments=arguments) as (server, writer),
        relayed(server.endpoint, "/quiet/") as (relay, mirror, copy),
    ):
        for n in range(5):
            revision = await writer.put("/other", b"%d" % n)
        await eventually(lambda: mirror._watched[1].seen >= revision, what="progress")
        await relay.shut()
        await compact(writer, revision)
        await writer.put("/quiet/a", b"")
        await relay.open()
        await eventually(lambda: "/quiet/a" in copy.kvs)
        assert len(copy.snapshots) == 1, "it knew that it had missed nothing, and resumed"


async def test_different_cluster_at_address_is_reloaded_and_reported(tmp_path: Path) -> None:
    async with own_etcd(tmp_path / "1") as (first, one), own_etcd(tmp_path / "2") as (second, two):
        await put_many(one, [(f"/a/{n}", b"one") for n in range(5)])
        for n in range(50):
            await two.put("/a/0", b"%d" % n)
        async with relayed(first.endpoint, "/a/") as (relay, _, copy):
            relay.target(second.endpoint)
            await relay.cut()
            final = await content(two, "/a/")
            await eventually(lambda: copy.kvs == final)
            assert copy.restored == 1


async def test_closing_the_client_ends_a_waiting_read(etcd: EmbeddedEtcd) -> None:
    async with connected(EtcdClient([etcd.endpoint])) as client:
        stream = WatchStream(client, write_timeout_s=PATIENCE_S)
        await stream.watch(1, "/k", 0, exact=True, fragments=False)
        created = await stream.read(PATIENCE_S)
        assert created is not None
        reading = asyncio.create_task(stream.read(PATIENCE_S))
        await asyncio.sleep(0.1)
    with pytest.raises(EtcdUnavailable):
        await reading


async def test_cancelled_mirror_leaves_no_task_behind(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    before = asyncio.all_tasks()
    async with mirrored(etcd_client, f"{etcd_prefix}/"):
        pass
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() <= before


async def test_mirror_started_before_etcd_waits(tmp_path: Path) -> None:
    async with own_etcd(tmp_path) as (server, client):
        await client.put("/a/1", b"")
        await server.stop()
        copy = Copy("/a/")
        mirror = PrefixMirror(client, ["/a/"], copy)
        async with running(mirror.run()):
            await asyncio.sleep(0.2)
            assert not copy.snapshots
            await server.start()
            await asyncio.wait_for(mirror.wait_synced(), PATIENCE_S)
            assert list(copy.kvs) == ["/a/1"]


@pytest.mark.parametrize("prefixes", [[], ["/a/", "/a/"], ["/a/", ""]])
def test_indistinguishable_prefixes_are_refused(prefixes: list[str]) -> None:
    with pytest.raises(ValueError, match="prefixes"):
        PrefixMirror(EtcdClient(["127.0.0.1"]), prefixes, Copy())
