"""What administrative requests need by the table of APIs, and what they get without it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from kproxy.proxy import acl_filter
from kproxy.proxy.acl_filter import AclFilter
from kproxy.proxy.apis import APIS, Api, Handling
from kproxy.security.acls import CLUSTER_NAME, Operation, Resource
from kproxy_codec import api_keys as keys
from kproxy_codec.control import build_response, decode_response, encode_response
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import parse_request_header, request_header
from kproxy_codec.partitioned import with_length
from tests.unit.proxy import acl_filters
from tests.unit.proxy.acl_filters import Right, access_of, answered, filtered

ALTER, DELETE, DESCRIBE, READ = Operation.ALTER, Operation.DELETE, Operation.DESCRIBE, Operation.READ
CLUSTER, GROUP, TOPIC, TRANSACTION = Resource.CLUSTER, Resource.GROUP, Resource.TOPIC, Resource.TRANSACTIONAL_ID

RULE = {"resource_type": 2, "resource_name": "t", "resource_pattern_type": 3, "principal": "User:u", "host": "*"}
FILTER = {"resource_type_filter": 2, "pattern_type_filter": 3, "operation": 3, "permission_type": 3}
PARTITION = {"partition_index": 0, "offset": 1}
EPOCH = {"partition": 0, "current_leader_epoch": -1, "leader_epoch": 0}
FEATURE = {"feature": "f", "max_version_level": 1, "upgrade_type": 1}
QUOTA = {"entity": [{"entity_type": "user", "entity_name": "u"}], "ops": []}
MOVE = {"name": "t", "partitions": [{"partition_index": 0, "replicas": [1]}]}

# Of the cluster: the version, the fields, and the operation.
OF_CLUSTER: dict[int, tuple[int, dict[str, Any], Operation]] = {
    keys.DESCRIBE_LOG_DIRS: (4, {"topics": None}, DESCRIBE),
    keys.ELECT_LEADERS: (2, {"topic_partitions": None}, ALTER),
    keys.ALTER_PARTITION_REASSIGNMENTS: (0, {"topics": [MOVE]}, ALTER),
    keys.LIST_PARTITION_REASSIGNMENTS: (0, {"topics": None}, DESCRIBE),
    keys.DESCRIBE_CLIENT_QUOTAS: (1, {"components": []}, DESCRIBE),
    keys.ALTER_CLIENT_QUOTAS: (1, {"entries": [QUOTA]}, ALTER),
    keys.DESCRIBE_USER_SCRAM_CREDENTIALS: (0, {"users": None}, DESCRIBE),
    keys.ALTER_USER_SCRAM_CREDENTIALS: (0, {"deletions": [{"name": "u", "mechanism": 1}], "upsertions": []}, ALTER),
    keys.DESCRIBE_QUORUM: (1, {"topics": []}, DESCRIBE),
    keys.UPDATE_FEATURES: (1, {"feature_updates": [FEATURE]}, ALTER),
    keys.LIST_CONFIG_RESOURCES: (1, {"resource_types": []}, DESCRIBE),
    keys.DESCRIBE_ACLS: (3, FILTER, DESCRIBE),
    keys.CREATE_ACLS: (3, {"creations": [RULE | {"operation": 3, "permission_type": 3}]}, ALTER),
    keys.DELETE_ACLS: (3, {"filters": [FILTER]}, ALTER),
}
BROKERS_ACLS = {keys.DESCRIBE_ACLS, keys.CREATE_ACLS, keys.DELETE_ACLS}


def named(**fields: Any) -> list[dict[str, Any]]:
    """The topics a and b."""
    return [{"name": each, **fields} for each in "ab"]


# Of parts "a" and "b": the version, the fields, and what each part needs.
OF_PARTS: dict[int, tuple[int, dict[str, Any], Operation, Resource]] = {
    keys.DESCRIBE_GROUPS: (5, {"groups": ["a", "b"]}, DESCRIBE, GROUP),
    keys.CONSUMER_GROUP_DESCRIBE: (0, {"group_ids": ["a", "b"]}, DESCRIBE, GROUP),
    keys.DELETE_GROUPS: (2, {"groups_names": ["a", "b"]}, DELETE, GROUP),
    keys.OFFSET_DELETE: (0, {"group_id": "g", "topics": named(partitions=[{"partition_index": 0}])}, READ, TOPIC),
    keys.DELETE_RECORDS: (2, {"topics": named(partitions=[PARTITION])}, DELETE, TOPIC),
    keys.OFFSET_FOR_LEADER_EPOCH: (
        4,
        {"topics": [{"topic": each, "partitions": [EPOCH]} for each in "ab"]},
        DESCRIBE,
        TOPIC,
    ),
    keys.DESCRIBE_PRODUCERS: (0, {"topics": named(partition_indexes=[0])}, READ, TOPIC),
    keys.DESCRIBE_TRANSACTIONS: (0, {"transactional_ids": ["a", "b"]}, DESCRIBE, TRANSACTION),
    keys.INCREMENTAL_ALTER_CONFIGS: (
        1,
        {"resources": [{"resource_type": 2, "resource_name": each, "configs": []} for each in "ab"]},
        ALTER,
        TOPIC,
    ),
    keys.ALTER_CONFIGS: (
        2,
        {"resources": [{"resource_type": 32, "resource_name": each, "configs": []} for each in "ab"]},
        ALTER,
        GROUP,
    ),
}
# What a whole request needs besides.
WHOLE: dict[int, list[Right]] = {keys.OFFSET_DELETE: [(DELETE, GROUP, "g")]}
ERRORS = {TOPIC: 29, GROUP: 30, CLUSTER: 31, TRANSACTION: 53}


def filter_of(rights: Iterable[Right], *, dry_run: bool = False, is_carried: bool = False) -> AclFilter:
    return acl_filters.filter_of(access_of(rights, dry_run=dry_run), is_carried=is_carried)


async def sent(by: AclFilter, api_key: int, version: int, **fields: Any) -> Any:
    """The request that a broker gets."""
    _, request = await filtered(by, api_key, version, **fields)
    assert request is not None
    return request


async def amended(rights: Iterable[Right], api_key: int, version: int, request: Any, **answer: Any) -> Any:
    """What the client gets of a broker's answer."""
    by = filter_of(rights)
    found, _ = await filtered(by, api_key, version, **request)
    whole = encode_response(build_response(api_key, version, **answer))
    return decode_response(api_key, version, await by.amend(found, whole))


def codes(part: Any) -> Iterator[int]:
    """The error codes in an answer that are not NONE."""
    if isinstance(part, dict):
        for name, value in part.items():
            if name == "error_code" and value:
                yield value
            else:
                yield from codes(value)
    elif isinstance(part, list):
        for each in part:
            yield from codes(each)


def test_every_administrative_api_is_covered() -> None:
    of_cluster = {key for key, api in APIS.items() if any(need.resource is CLUSTER for need in api.needs or ())}
    assert of_cluster == OF_CLUSTER.keys() | {keys.DESCRIBE_CONFIGS, keys.ALTER_CONFIGS, keys.INCREMENTAL_ALTER_CONFIGS}
    each = (Handling.EACH_OWNER, Handling.EACH_GROUP, Handling.EACH_TRANSACTION)
    assert {key for key, api in APIS.items() if api.handling in each} <= OF_PARTS.keys()


@pytest.mark.parametrize("api_key", OF_CLUSTER)
async def test_administration_needs_the_cluster(api_key: int) -> None:
    version, fields, operation = OF_CLUSTER[api_key]
    others = [(READ, CLUSTER, CLUSTER_NAME), (operation, TOPIC, CLUSTER_NAME), (operation, CLUSTER, "other")]
    answer = await answered(filter_of([] if operation is DESCRIBE else others), api_key, version, **fields)
    assert set(codes(answer.to_dict())) == {31}
    rights = [(operation, CLUSTER, CLUSTER_NAME)]
    await sent(filter_of(rights, is_carried=True), api_key, version, **fields)
    await sent(filter_of([], dry_run=True), api_key, version, **fields)
    if api_key in BROKERS_ACLS:
        # They would not hold for the clients of the proxy.
        answer = await answered(filter_of(rights), api_key, version, **fields)
        assert set(codes(answer.to_dict())) == {54}
        assert "kproxy acl" in str(answer)
    else:
        await sent(filter_of(rights), api_key, version, **fields)


@pytest.mark.parametrize("api_key", OF_PARTS)
async def test_each_part_needs_its_right(api_key: int) -> None:
    version, fields, operation, kind = OF_PARTS[api_key]
    whole = WHOLE.get(api_key, [])
    at, _ = APIS[api_key].parts
    for names in ("a", "ab"):
        asked = await sent(
            filter_of([*whole, *((operation, kind, name) for name in names)]), api_key, version, **fields
        )
        assert len(getattr(asked, at)) == len(names)
    answer = await answered(filter_of(whole), api_key, version, **fields)
    assert list(codes(answer.to_dict())) == [ERRORS[kind]] * 2
    for need in whole:
        answer = await answered(filter_of({*whole, (operation, kind, "a")} - {need}), api_key, version, **fields)
        assert set(codes(answer.to_dict())) == {ERRORS[need[1]]}


async def test_lists_have_what_the_client_may_see() -> None:
    groups = [{"group_id": each, "protocol_type": "consumer"} for each in "ab"]
    rights = [(DESCRIBE, GROUP, "a")]
    answer = await amended(rights, keys.LIST_GROUPS, 4, {}, groups=groups, error_code=15)
    assert (answer.error_code, [each.group_id for each in answer.groups]) == (15, ["a"])
    answer = await amended([(DESCRIBE, CLUSTER, CLUSTER_NAME)], keys.LIST_GROUPS, 4, {}, groups=groups)
    assert [each.group_id for each in answer.groups] == ["a", "b"]
    topics = [{"topic": each, "partitions": [0]} for each in "ab"]
    states = [{"transactional_id": each} for each in "ab"]
    seen = [(DESCRIBE, TRANSACTION, "a"), (DESCRIBE, TOPIC, "b")]
    answer = await amended(seen, keys.LIST_TRANSACTIONS, 0, {}, transaction_states=states)
    assert [each.transactional_id for each in answer.transaction_states] == ["a"]
    asked = {"transactional_ids": ["a"]}
    answer = await amended(
        seen, keys.DESCRIBE_TRANSACTIONS, 0, asked, transaction_states=[states[0] | {"topics": topics}]
    )
    assert [each.topic for each in answer.transaction_states[0].topics] == ["b"]


async def test_members_with_hidden_topics_are_not_described() -> None:
    has = [{"topic_id": None, "topic_name": "t", "partitions": [0]}]
    member = {"member_id": "m", "assignment": {"topic_partitions": has}, "target_assignment": {"topic_partitions": []}}
    described = [{"group_id": "a", "members": [member]}]
    for rights, code in (([], 29), ([(DESCRIBE, TOPIC, "t")], 0)):
        seen = [*rights, (DESCRIBE, GROUP, "a")]
        answer = await amended(seen, keys.CONSUMER_GROUP_DESCRIBE, 1, {"group_ids": ["a"]}, groups=described)
        assert (answer.groups[0].error_code, len(answer.groups[0].members)) == (code, code == 0)


async def test_new_groups_need_their_topics() -> None:
    fields = {"group_id": "g", "member_id": "m", "member_epoch": 0, "subscribed_topic_names": ["t"]}
    rights = [(READ, GROUP, "g"), (DESCRIBE, TOPIC, "t")]
    for right, code in zip(rights, (30, 29), strict=True):
        answer = await answered(filter_of({*rights} - {right}), keys.CONSUMER_GROUP_HEARTBEAT, 1, **fields)
        assert answer.error_code == code
    await sent(filter_of(rights), keys.CONSUMER_GROUP_HEARTBEAT, 1, **fields)
    fields["subscribed_topic_regex"] = "t.*"
    assert (await answered(filter_of(rights), keys.CONSUMER_GROUP_HEARTBEAT, 1, **fields)).error_code == 29
    await sent(filter_of(rights, is_carried=True), keys.CONSUMER_GROUP_HEARTBEAT, 1, **fields)


async def test_operations_of_the_proxy_are_not_shown() -> None:
    fields = {"groups": ["a"], "include_authorized_operations": True}
    asked = await sent(filter_of([(DESCRIBE, GROUP, "a")]), keys.DESCRIBE_GROUPS, 5, **fields)
    assert not asked.include_authorized_operations


async def test_telemetry_is_passed_on_unread() -> None:
    head = request_header(keys.PUSH_TELEMETRY, 0, 1, b"c")
    frame = memoryview(bytearray(b"".join(with_length([head, b"no message of Kafka's"]))))
    screened = await filter_of([]).screen(frame, parse_request_header(frame))
    assert (screened.answer, screened.frame) == (None, frame)


async def test_undecided_api_is_not_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    undecided = {**APIS, keys.DESCRIBE_QUORUM: Api(Handling.ANY_BROKER, (0, 1))}
    monkeypatch.setattr(acl_filter, "APIS", undecided)
    every = [(Operation.ADMIN, CLUSTER, CLUSTER_NAME)]
    with pytest.raises(CodecError, match="DESCRIBE_QUORUM is refused, because the proxy has no access rules"):
        await filtered(filter_of(every), keys.DESCRIBE_QUORUM, 1, topics=[])
