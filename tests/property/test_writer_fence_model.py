"""Random runs of the replication model with writers that claim the partition from one another and never stop.

The world is that of `test_replication_model`, but the runs are drawn here, with weights for the relevant steps: claims,
changes of leaders, and an etcd that is slow or loses calls. As the first claim ends all writes without a fence, a run
of other steps would test little.
"""

from __future__ import annotations

import os

from tests.support.models.replication_model import Setting
from tests.support.models.replication_search import Weights, search

RUNS = int(os.environ.get("KPROXY_SIM_SEEDS", "25"))
SEED = int(os.environ.get("KPROXY_SIM_FIRST_SEED", "1"))
STEPS_PER_RUN = 60
WEIGHTS: Weights = {
    "claim": 6,
    "bind": 4,
    "write_fenced": 16,
    "release": 1,
    "hang_up": 1,
    "produce": 2,
    "advance": 5,
    "crash": 1,
    "restart": 6,
    "freeze": 1,
    "thaw": 4,
    "freeze_within": 1,
    "stop": 0.5,
    "fail_disk": 0.5,
    "link": 3,
    "etcd_applies": 8,
    "etcd_answers": 6,
    "etcd_loses": 1,
    "watch": 2,
}


SETTINGS = [
    Setting(3, min_insync_replicas, hand_over_after_s=hand_over_after_s)
    for min_insync_replicas in (1, 2)
    for hand_over_after_s in (float("inf"), 5.0)
]


def test_no_writer_writes_after_its_successor() -> None:
    found = search(range(SEED, SEED + RUNS), SETTINGS, WEIGHTS, STEPS_PER_RUN)
    assert found is None, str(found)
