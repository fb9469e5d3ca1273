"""The answers of one process to claims that it cannot check."""

from __future__ import annotations

from collections import Counter

import pytest

from kproxy.etcd import EtcdClient
from kproxy_codec.error_codes import COORDINATOR_NOT_AVAILABLE, INVALID_REQUEST
from kproxy_codec.own import FenceBinding, OwnRequest, OwnResource
from tests.support.claims.own_services import own_service


async def bind(bindings: list[FenceBinding], deadline: float) -> dict[tuple[str, int], int]:
    raise AssertionError("nothing is granted")


@pytest.mark.parametrize(
    ("group", "resources", "error_code", "refused"),
    [
        ("g", (OwnResource("a", 1), OwnResource("b", 1)), COORDINATOR_NOT_AVAILABLE, 2),
        ("g", None, COORDINATOR_NOT_AVAILABLE, 1),
        ("", (OwnResource("a", 1), OwnResource("b", 1)), INVALID_REQUEST, 2),
    ],
)
async def test_wholly_refused_claim_is_counted_per_resource(
    group: str, resources: tuple[OwnResource, ...] | None, error_code: int, refused: int
) -> None:
    counters = Counter[str]()
    client = EtcdClient(["http://127.0.0.1:1"])
    try:
        own = own_service(client, "/p", timeout_s=0.01, counters=counters)
        connection = own.connection("client", lambda reason: None)
        response = await own.own(connection, OwnRequest(group, resources), bind)
        assert (response.error_code, response.resources) == (error_code, ())
        assert connection.group is None, "it is bound to nothing by that"
        assert counters == {"own.refused": refused}
    finally:
        await client.close()
