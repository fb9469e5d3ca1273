"""The resources that an application may request, and the errors for invalid requests."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import kafka
import pytest

from kproxy.claims.client import OwnRefused, own, own_sync
from kproxy.claims.client.plan import ClaimPlan, plan_of
from kproxy_codec.error_codes import (
    COORDINATOR_NOT_AVAILABLE,
    FENCED_INSTANCE_ID,
    INVALID_REQUEST,
    POLICY_VIOLATION,
    REQUEST_TIMED_OUT,
    THROTTLING_QUOTA_EXCEEDED,
    UNKNOWN_TOPIC_OR_PARTITION,
)


def asked(**changes: Any) -> ClaimPlan:
    whole: dict[str, Any] = {"group": "g", "resources": ["t/0"], "generation": 2, "stand_by": False, "reclaim": False}
    return plan_of(timeout_s=1.0, check_every_s=1.0, **{**whole, **changes})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ("t/0",)),
        ({"resources": [("t", 1), kafka.TopicPartition("t", 2), "a job"]}, ("t/1", "t/2", "a job")),
        ({"resources": None}, ("",)),
        ({"resources": (each for each in ("b", "a"))}, ("b", "a")),
    ],
)
def test_resources_may_be_given_in_any_form(changes: dict[str, Any], names: tuple[str, ...]) -> None:
    assert asked(**changes).resources == names


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"resources": "t/0"}, r"expected a list, such as \['t/0'\]"),
        ({"resources": []}, "0 resources; expected 1 to 4096, or None for the whole group"),
        ({"resources": [""]}, "a resource has an empty name; give None for the whole group"),
        ({"resources": ["t/0", ("t", 0)]}, "a resource is named twice"),
        ({"resources": [f"t/{each}" for each in range(4097)]}, "4097 resources"),
        ({"group": ""}, "the group has an empty name"),
        ({"generation": -1}, "invalid generation -1; expected 1 or more, or 0 to take over from any client"),
        ({"generation": 1, "stand_by": True}, "need named resources and a generation of 2 or more"),
        ({"generation": 0, "reclaim": True}, "need named resources and a generation of 2 or more"),
        ({"resources": None, "reclaim": True}, "need named resources and a generation of 2 or more"),
    ],
)
def test_invalid_arguments_are_reported(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        asked(**changes)


@pytest.mark.parametrize(("owning", "other"), [(own, "own_sync"), (own_sync, "own")])
def test_unsupported_client_error_names_the_other_module(owning: Any, other: str) -> None:
    with pytest.raises(TypeError, match=rf"not object; see {other}$"):
        owning(object(), "g", ["t/0"], 2)


@pytest.mark.parametrize(
    ("error_code", "beginning"),
    [
        (FENCED_INSTANCE_ID, "t/0 of the group g is owned with a generation above 3; claim it with a higher one"),
        (REQUEST_TIMED_OUT, "t/0 of the group g is not granted yet: "),
        (COORDINATOR_NOT_AVAILABLE, "t/0 of the group g cannot be claimed now, as the proxies do not reach etcd; "),
        (INVALID_REQUEST, "t/0 of the group g cannot be claimed so: "),
        (UNKNOWN_TOPIC_OR_PARTITION, "t/0 of the group g is refused, as no broker has such a partition; "),
        (THROTTLING_QUOTA_EXCEEDED, "t/0 of the group g cannot be claimed, as etcd has as many claims as it may; "),
        (POLICY_VIOLATION, "t/0 of the group g is refused with POLICY_VIOLATION."),
    ],
)
def test_refusal_names_the_resource_and_reason(error_code: int, beginning: str) -> None:
    refused = OwnRefused(error_code, "g", "t/0", 3)
    assert str(refused).startswith(beginning)
    assert str(refused).endswith(".")
    assert str(OwnRefused(error_code, "g", "", 3)).startswith("All of it of the group g ")


@pytest.mark.parametrize(
    ("module", "library"),
    [
        ("kproxy.claims.client", ""),
        ("kproxy.claims.client.aiokafka", "aiokafka"),
        ("kproxy.claims.client.kafka_python", "kafka"),
    ],
)
def test_applications_load_the_codec_and_one_client_library(module: str, library: str) -> None:
    probe = f"import sys, {module}; print(*sorted({{each.partition('.')[0] for each in sys.modules}}))"
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", probe]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    others = {"grpc", "google", "aiohttp", "uvloop", "msgspec", "structlog", "click", "aiokafka", "kafka"} - {library}
    assert not others & set(loaded)
    assert {"kproxy_codec", "kproxy"} <= set(loaded)
