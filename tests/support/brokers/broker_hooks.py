"""Cause faults in a test's broker; each fault is an option of `tests.support.brokers.broker_main`.

stops_at_marks=1       the broker stops itself within a write that has a mark. A stopped process keeps its sockets and
                       its place in the code, for example between the fence check and the write, where a page fault or a
                       hypervisor may hold it for longer than its lease lives.
replication_at=PORT    followers get this port in place of the broker's, so that a test's relay can cut them off.
unfenced=1             from SIGUSR1 on, which it confirms with UNFENCED in its log, it ignores its own fence: it leads
                       its partitions for ever, even if etcd names another leader.
disk_may_stall=1       fsync and fdatasync do not return while a file DATA_DIR.stalled stands beside its data directory;
                       like calls to a real disk, they wait without the interpreter's lock.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kproxy.broker import segment, server
from kproxy.broker.keys import BrokerValue
from kproxy.broker.log import Log
from kproxy.broker.partition import Partition
from kproxy.broker.replica_manager import ReplicaManager
from kproxy.etcd.lease import LeaseFence

# After the check of the fence, before the write.
BEFORE_THE_WRITE = b"[stop before the write]"
# After the write, before the next check of the fence.
AFTER_THE_WRITE = b"[stop after the write]"
# The leader has appended the batch; no follower has it, and no answer has been sent.
AFTER_THE_APPEND = b"[stop after the append]"
UNFENCED = "nothing fences this broker off any more"


def _stop_at_marks(_: int) -> None:
    Log.append = _stopping(Log.append, BEFORE_THE_WRITE, AFTER_THE_WRITE)  # type: ignore[method-assign]
    Partition.append_as_leader = _stopping(  # type: ignore[method-assign]
        Partition.append_as_leader, None, AFTER_THE_APPEND
    )


def _stopping(method: Callable[..., Any], before: bytes | None, after: bytes) -> Callable[..., Any]:
    def stopping(self: object, records: memoryview, *arguments: Any) -> Any:
        marked = bytes(records)
        if before is not None and before in marked:
            os.kill(os.getpid(), signal.SIGSTOP)
        result = method(self, records, *arguments)
        if after in marked:
            os.kill(os.getpid(), signal.SIGSTOP)
        return result

    return stopping


def _replicate_at(port: int) -> None:
    def made(node_id: int, host: str, client_port: int, _: int, log_id: uuid.UUID) -> BrokerValue:
        return BrokerValue(node_id, host, client_port, port, log_id)

    vars(server)["BrokerValue"] = made


def _unfence_at_signal(_: int) -> None:
    def unfence(*_: object) -> None:
        LeaseFence.is_live = lambda self: True  # type: ignore[method-assign]
        ReplicaManager._drop = lambda self, key, reason: None  # type: ignore[method-assign]
        sys.stderr.write(f"{UNFENCED}\n")
        sys.stderr.flush()

    signal.signal(signal.SIGUSR1, unfence)


def _stall_when_told(_: int) -> None:
    told = Path(f"{sys.argv[2]}.stalled")

    def stalling(sync: Callable[[int], None]) -> Callable[[int], None]:
        def wait(fd: int) -> None:
            while told.exists():
                time.sleep(0.05)
            sync(fd)

        return wait

    vars(os).update(fsync=stalling(os.fsync), fdatasync=stalling(os.fdatasync))
    vars(segment)["_sync_data"] = os.fdatasync


HOOKS: dict[str, Callable[[int], None]] = {
    "stops_at_marks": _stop_at_marks,
    "replication_at": _replicate_at,
    "unfenced": _unfence_at_signal,
    "disk_may_stall": _stall_when_told,
}
