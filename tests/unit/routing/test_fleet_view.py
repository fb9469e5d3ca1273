"""What a proxy makes of snapshots and changes of the other proxies' entries, without etcd."""

from __future__ import annotations

import json
from collections import Counter

from structlog.testing import capture_logs

from kproxy.etcd import EtcdClient, KeyValue, Snapshot, WatchEvent
from kproxy.fleet.registration import proxies_prefix
from kproxy.fleet.view import FleetView, alone
from kproxy.routing.fleet import FIRST_NODE_ID, Fleet

HOST = "proxy.test"
MINE, LISTENER_PORT = 9, 1_000
ONE, TWO, THREE = range(FIRST_NODE_ID, FIRST_NODE_ID + 3)
Ports = dict[int, int]


class Viewed:
    """The view of the proxy on port MINE, which has the listener `tls` on MINE + LISTENER_PORT."""

    def __init__(self) -> None:
        self.fleet, self.tls = Fleet([alone(HOST, MINE)]), Fleet([alone(HOST, MINE + LISTENER_PORT)])
        self.counters = Counter[str]()
        self.view = FleetView(
            # It is never connected.
            EtcdClient(["http://127.0.0.1:1"]),
            "/kproxy",
            self.fleet,
            HOST,
            MINE,
            counters=self.counters,
            listeners={"tls": (HOST, MINE + LISTENER_PORT)},
            by_listener={"tls": self.tls},
        )

    def begin(self, ports: Ports) -> None:
        self.view.on_snapshot(Snapshot(1, 1, [_entry(node_id, port) for node_id, port in ports.items()]))

    def change(self, node_id: int, port: int | None) -> None:
        kv = _entry(node_id, port or MINE)
        self.view.on_events([WatchEvent(port is None, kv if port else kv._replace(value=b""))], 2)

    @property
    def named(self) -> tuple[Ports, Ports]:
        """The ports by id that clients of the first listener see, and those that clients of `tls` see."""
        first, tls = ({each.node_id: each.port for each in fleet.proxies} for fleet in (self.fleet, self.tls))
        return first, {node_id: port - LISTENER_PORT for node_id, port in tls.items()}


def _entry(node_id: int, port: int) -> KeyValue:
    value = _address(node_id, port, listeners={"tls": {"host": HOST, "port": port + LISTENER_PORT}})
    return KeyValue(f"{proxies_prefix('/kproxy')}{node_id}", value, 1, 1, 1, 0)


def _address(node_id: int, port: int, **more: object) -> bytes:
    return json.dumps({"node_id": node_id, "host": HOST, "port": port, **more}).encode()


def test_snapshot_replaces_all_entries() -> None:
    one = Viewed()
    one.begin({ONE: MINE, TWO: 2, THREE: 3})
    assert one.named == ({ONE: MINE, TWO: 2, THREE: 3},) * 2
    one.begin({ONE: MINE, THREE: 4})
    assert one.named == ({ONE: MINE, THREE: 4},) * 2


def test_deleted_entry_leaves_every_listener() -> None:
    one = Viewed()
    one.begin({ONE: MINE, TWO: 2})
    one.change(TWO, None)
    assert one.named == ({ONE: MINE},) * 2
    one.change(TWO, 5)
    assert one.named == ({ONE: MINE, TWO: 5},) * 2


def test_own_id_is_kept_until_another_has_it() -> None:
    one = Viewed()
    one.begin({TWO: MINE, ONE: 1})
    one.change(TWO, None)
    assert one.named == ({ONE: 1, TWO: MINE},) * 2
    one.change(TWO, 7)
    assert one.named == ({ONE: 1, TWO: 7},) * 2


def test_proxy_without_an_id_names_the_others() -> None:
    one = Viewed()
    one.begin({})
    assert one.named == ({FIRST_NODE_ID: MINE},) * 2
    one.begin({TWO: 2})
    assert one.named == ({TWO: 2},) * 2


def test_leaving_proxy_names_itself_while_alone() -> None:
    one = Viewed()
    one.begin({ONE: 1, TWO: MINE})
    one.change(TWO, None)
    one.view.leave()
    assert one.named == ({ONE: 1},) * 2
    one.change(ONE, None)
    assert one.named == ({TWO: MINE}, {TWO: MINE})


def test_proxy_without_the_listener_is_not_its_member() -> None:
    one = Viewed()
    one.begin({ONE: MINE})
    one.view.on_events([WatchEvent(False, _entry(TWO, 2)._replace(value=_address(TWO, 2)))], 2)
    assert one.named == ({ONE: MINE, TWO: 2}, {ONE: MINE})
    one.view.leave()
    one.change(ONE, None)
    # Somebody has to be named: this proxy, while it still serves.
    assert one.named == ({TWO: 2}, {FIRST_NODE_ID: MINE})


def test_changes_of_other_proxies_are_logged() -> None:
    one = Viewed()
    with capture_logs() as logs:
        one.begin({ONE: MINE, TWO: 2})
        one.begin({ONE: MINE, THREE: 3})
        one.begin({TWO: MINE, THREE: 3})
    assert [{key: log.get(key) for key in ("event", "others", "come", "gone")} for log in logs] == [
        {"event": "proxies changed", "others": 1, "come": f"{TWO} at {HOST}:2", "gone": None},
        {"event": "proxies changed", "others": 1, "come": f"{THREE} at {HOST}:3", "gone": f"{TWO} at {HOST}:2"},
    ]


def test_entry_with_an_invalid_listener_is_skipped() -> None:
    one = Viewed()
    one.begin({ONE: MINE})
    bad = _entry(TWO, 2)
    one.view.on_events([WatchEvent(False, bad._replace(value=bad.value.replace(b'"tls"', b'"tls": 1, "x"')))], 2)
    assert one.named == ({ONE: MINE},) * 2
    assert one.counters.total() == 1
