"""The offered versions, by the versions that brokers serve."""

from __future__ import annotations

import pytest

from kproxy.proxy.api_versions import FENCES, BrokerApis, covers, intersect, offer
from kproxy.proxy.apis import APIS, SERVED, Ranges, proxy_ranges
from kproxy_codec import api_keys as keys

TRANSACTIONS, CLUSTER, GROUPS = "transaction.version", "metadata.version", "group.version"
# A current broker: everything, in every version, and transactions of the second kind.
ALL: Ranges = dict.fromkeys(SERVED, (0, 99))
NEW = BrokerApis(ALL, {TRANSACTIONS: (0, 2), CLUSTER: (1, 5)}, {TRANSACTIONS: (2, 2), CLUSTER: (4, 4)}, 7)


def without(key: int) -> Ranges:
    return {each: versions for each, versions in ALL.items() if each != key}


@pytest.mark.parametrize(
    ("upstreams", "caps", "produce"),
    [
        ([], {}, proxy_ranges()[keys.PRODUCE]),
        ([ALL], {}, proxy_ranges()[keys.PRODUCE]),
        ([{**ALL, keys.PRODUCE: (3, 9)}], {}, (0, 9)),
        ([ALL, {**ALL, keys.PRODUCE: (3, 9)}, {**ALL, keys.PRODUCE: (0, 7)}], {}, (0, 7)),
        ([ALL], {keys.PRODUCE: 8}, (0, 8)),
        ([{**ALL, keys.PRODUCE: (3, 7)}], {keys.PRODUCE: 8}, (0, 7)),
        ([ALL, without(keys.PRODUCE)], {}, None),
        ([{**ALL, keys.PRODUCE: (50, 60)}], {}, None),
    ],
)
def test_produce_is_offered_up_to_common_version(
    upstreams: list[Ranges], caps: dict[int, int], produce: tuple[int, int] | None
) -> None:
    assert intersect(upstreams, caps).get(keys.PRODUCE) == produce


def test_api_versions_ranges_are_the_proxys_own() -> None:
    assert intersect([{}])[keys.API_VERSIONS] == proxy_ranges()[keys.API_VERSIONS]


def features_before(*brokers: BrokerApis, produce: int = 13) -> tuple[dict[str, tuple[int, int]], int]:
    offered = offer(brokers, {keys.PRODUCE: produce})
    return dict(offered.finalized), offered.epoch


def test_old_produce_versions_offer_only_old_transactions() -> None:
    """KIP-890: a client that is told level 2 and may not send Produce 12 aborts its transactions."""
    assert features_before(NEW, produce=11) == ({TRANSACTIONS: (1, 1), CLUSTER: (4, 4)}, 57)
    assert dict(offer([NEW], {keys.PRODUCE: 11}).supported) == {TRANSACTIONS: (0, 1), CLUSTER: (1, 5)}


def test_lower_transaction_version_has_higher_epoch() -> None:
    """Java clients ignore finalized features unless their epoch exceeds the known one."""
    one = BrokerApis(without(keys.END_TXN), NEW.supported, NEW.finalized, NEW.epoch)
    uncapped = offer([BrokerApis(ALL, {}, {TRANSACTIONS: (1, 1)}, 7)], {keys.PRODUCE: 11})
    assert features_before(NEW, produce=11)[1] > uncapped.epoch
    assert features_before(BrokerApis(ALL, {}, {}, 8))[1] > features_before(one)[1]


def test_unsupported_transactions_name_no_transaction_version() -> None:
    broker = BrokerApis(without(keys.END_TXN), NEW.supported, NEW.finalized, NEW.epoch)
    assert features_before(broker)[0] == {CLUSTER: (4, 4)}


def test_finalized_features_come_from_the_latest_broker() -> None:
    late = BrokerApis(ALL, {}, {CLUSTER: (3, 3)}, 6)
    mute = BrokerApis(ALL)
    assert features_before(late, BrokerApis(ALL, {}, {CLUSTER: (4, 4)}, 9), mute) == ({CLUSTER: (4, 4)}, 72)
    assert features_before(mute) == ({}, -1)
    assert features_before() == ({}, -1)


def test_supported_features_are_the_common_ones() -> None:
    brokers = [
        BrokerApis(ALL, {CLUSTER: (1, 5), TRANSACTIONS: (1, 2), GROUPS: (0, 3)}),
        BrokerApis(ALL, {CLUSTER: (2, 7), TRANSACTIONS: (3, 4)}),
    ]
    assert dict(offer(brokers).supported) == {CLUSTER: (2, 5)}


def test_features_need_the_apis_they_promise() -> None:
    """librdkafka reads nothing, and reports nothing, if group.version is announced without its requests."""
    theirs = {GROUPS: (1, 1), "share.version": (1, 1), "kraft.version": (1, 1), "new.version": (3, 3), CLUSTER: (4, 4)}
    offered = offer([BrokerApis(without(keys.CONSUMER_GROUP_HEARTBEAT), theirs, theirs, 7)])
    assert dict(offered.finalized) == dict(offered.supported) == {CLUSTER: (4, 4)}
    # Each level that is withheld counts, because an equal epoch does not lower a level that is known.
    both = BrokerApis(without(keys.CONSUMER_GROUP_HEARTBEAT), {}, {GROUPS: (1, 1), TRANSACTIONS: (2, 2)}, 7)
    epochs = [offer([both], {keys.PRODUCE: most}).epoch for most in (13, 11)]
    assert epochs == [57, 58]


@pytest.mark.parametrize(
    ("offered", "wanted", "covered"),
    [
        ({0: (0, 9), 1: (4, 11)}, {0: (0, 9)}, True),
        ({0: (0, 9)}, {0: (0, 8)}, True),
        ({0: (0, 9)}, {0: (0, 10)}, False),
        ({0: (1, 9)}, {0: (0, 9)}, False),
        ({0: (0, 9)}, {0: (0, 9), 1: (0, 0)}, False),
        ({}, {}, True),
    ],
)
def test_announced_versions_are_covered_while_all_offered(offered: Ranges, wanted: Ranges, covered: bool) -> None:
    assert covers(offered, wanted) is covered


# KafScale lists what it does not serve with versions -1 to -1.
KAFSCALE = BrokerApis(ALL | {keys.INIT_PRODUCER_ID: (-1, -1), keys.END_TXN: (-1, -1), keys.FIND_COORDINATOR: (3, 3)})
REFERENCE = BrokerApis({key: ALL[key] for key in ALL if key != keys.END_TXN} | FENCES)
CAN_ANSWER = (keys.INIT_PRODUCER_ID, keys.FIND_COORDINATOR)


@pytest.mark.parametrize(
    ("brokers", "can_answer", "native"),
    [
        ([KAFSCALE], CAN_ANSWER, CAN_ANSWER),
        ([KAFSCALE], (), ()),
        ([KAFSCALE], (keys.INIT_PRODUCER_ID,), (keys.INIT_PRODUCER_ID,)),
        # Brokers that assign producer ids recognize batches; brokers that keep fences report coordinators themselves.
        ([REFERENCE], CAN_ANSWER, ()),
        # One broker that does not is enough.
        ([REFERENCE, KAFSCALE], CAN_ANSWER, CAN_ANSWER),
        # Transactions have coordinators that only brokers know.
        ([NEW], CAN_ANSWER, ()),
        # Nothing is known of brokers that have not answered.
        ([], CAN_ANSWER, ()),
        ([NEW.without([keys.INIT_PRODUCER_ID])], CAN_ANSWER, (keys.INIT_PRODUCER_ID,)),
    ],
)
def test_proxy_answers_its_own_apis(
    brokers: list[BrokerApis], can_answer: tuple[int, ...], native: tuple[int, ...]
) -> None:
    offered = offer(brokers, {}, {key: APIS[key].versions for key in can_answer})
    assert offered.native == set(native)
    for key in native:
        assert offered.ranges[key] == proxy_ranges()[key]
