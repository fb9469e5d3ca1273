"""Run a reference broker for tests, with options that cause faults.

`python -m tests.support.brokers.broker_main NODE_ID DATA_DIR ETCD[,…] PREFIX [option=value]`: options are
BrokerConfig's, but `listen`, `advertise` and `admin` are ports, and `replication_tls` is CERT,KEY,CA. Options of
`tests.support.brokers.broker_hooks` cause faults.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
import uvloop

from kproxy.broker.server import BrokerConfig, run_broker
from kproxy.config.tls import ReplicationTls
from kproxy.errors import StartupError
from tests.support.brokers.broker_hooks import HOOKS

_PORTS = ("listen", "advertise", "admin")


def _read(value: str) -> float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    return value


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    node_id, data_dir, etcd, prefix, *rest = sys.argv[1:]
    options: dict[str, Any] = {}
    for option in rest:
        name, _, value = option.partition("=")
        if name in HOOKS:
            HOOKS[name](int(value))
        elif name == "replication_tls":
            options[name] = ReplicationTls(*map(Path, value.split(",")))
        else:
            options[name] = ("127.0.0.1", int(value)) if name.endswith(_PORTS) else _read(value)
    endpoints = tuple(etcd.split(","))
    try:
        uvloop.run(run_broker(BrokerConfig(int(node_id), Path(data_dir), endpoints, prefix=prefix, **options)))
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
