"""What a replica remembers beside its log: checkpoint.json, replaced as one step.

The high watermark may be old, which is why nothing is ever truncated to it. It is Kafka's recovery point as well: it is
written down only once all that lies below is on the disk, names of segments included, and nothing below it is ever
taken back. So damage below it is the disk's, and damage from it on is what a power cut leaves. The leadership is the
highest one this replica has obeyed. The leader epoch is for a log that retention has emptied: at that log end offset,
it is the epoch of what was before.

The file carries a version. One without is of the release before versions, whose high watermark means the same: it, too,
was written down only once what lies below was on the disk.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from kproxy.broker.json_file import read_json, write_json
from kproxy.broker.leader_epochs import NO_LEADER_EPOCH
from kproxy.broker.segment import LogFailed

_FILE = "checkpoint.json"
_VERSION = 1


class Leadership(NamedTuple):
    """One broker's time as leader: its leader epoch, and the create revision of the lease key that it held.

    They rise together, so either tells which of two came later; but an etcd restored from a snapshot counts revisions
    from lower numbers again, and the epoch, which the logs bear witness to, goes first for that.
    """

    leader_epoch: int
    fencing_token: int


NO_LEADERSHIP = Leadership(NO_LEADER_EPOCH, 0)


class Checkpoint(NamedTuple):
    """Zeros in a log that has none."""

    high_watermark: int = 0
    obeyed_epoch: int = NO_LEADER_EPOCH
    fencing_token: int = 0
    log_end_offset: int = 0
    leader_epoch: int = NO_LEADER_EPOCH


def read_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint in `directory`. Raises OSError, LogFailed for one that cannot be what was written."""
    found = read_json(directory / _FILE)
    if found is None:
        return Checkpoint()
    version = found.get("version", 0)
    if not isinstance(version, int) or version > _VERSION:
        raise LogFailed(f"{directory / _FILE} is of version {version}, which a later release wrote: use that one")
    numbers = [found.get(name) for name in Checkpoint._fields]
    if not all(isinstance(number, int) for number in numbers):
        raise LogFailed(f"{directory / _FILE} is damaged: it says {found}")
    return Checkpoint._make(numbers)


def write_checkpoint(directory: Path, checkpoint: Checkpoint, replacing: AbstractContextManager[object]) -> None:
    """As `write_json`. Raises OSError."""
    write_json(directory / _FILE, {"version": _VERSION, **checkpoint._asdict()}, replacing)
