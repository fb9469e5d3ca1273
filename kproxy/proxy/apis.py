"""Declare how the proxy serves each API of Kafka's protocol.

`APIS` has one row for each API key that has a name. Rows decide how requests are handled and which versions are offered
(kproxy.proxy.api_versions); scripts/protocol_support.py writes docs/protocol-support.md from them.

`versions` are those that the proxy itself serves. Clients are offered those that the upstream brokers serve as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

from kproxy.security.acls import Operation, Resource
from kproxy.security.sasl import SASL_APIS
from kproxy_codec import api_keys as keys
from kproxy_codec import fetch, list_offsets, own, produce
from kproxy_codec.coordination import GROUP, OFFSETS_BY_ID_FROM, TRANSACTION, names_groups

Range = tuple[int, int]
"""Lowest and highest version, or level of a feature."""
Ranges = dict[int, Range]
"""Versions by API key."""
NO_RANGES: Final[Mapping[int, Range]] = MappingProxyType({})

NOT_SERVED: Final[Range] = (1, 0)
"""The range of an API that is not served: no version lies in it."""


class Handling(Enum):
    """Who answers a request; docs/protocol-support.md shows the values."""

    PROXY = "ended here"
    SPLIT = "split by owner"
    EACH_OWNER = "each owner"
    GROUP_COORDINATOR = "group coordinator"
    EACH_GROUP = "each group's coordinator"
    TRANSACTION_COORDINATOR = "transaction coordinator"
    EACH_TRANSACTION = "each transaction's coordinator"
    NAMED_BROKER = "named broker"
    ANY_BROKER = "any broker"
    ALL_BROKERS = "all brokers"
    REFUSED = "refused"


REQUEST_KEY_TYPES: Final[Mapping[Handling, int]] = MappingProxyType(
    {Handling.GROUP_COORDINATOR: GROUP, Handling.TRANSACTION_COORDINATOR: TRANSACTION}
)
"""FindCoordinator's key types, for requests that go to one coordinator as they are."""

PART_KEY_TYPES: Final[Mapping[Handling, int]] = MappingProxyType(
    {Handling.EACH_GROUP: GROUP, Handling.EACH_TRANSACTION: TRANSACTION}
)
"""FindCoordinator's key types, for requests that are divided, each part to its coordinator."""

_DIVIDED: Final = frozenset({*PART_KEY_TYPES, Handling.EACH_OWNER, Handling.NAMED_BROKER, Handling.ALL_BROKERS})


class Permission(NamedTuple):
    """The permission for `operation` on each resource of this kind that a request names.

    `at`: the field of the request with the name or the parts (kproxy_codec.parts). `to`: the field of the answer with
    the parts' results. The whole request needs a permission for the cluster. Of others, each part needs one with both
    fields, and the whole request one with `at` alone. With `to` alone the answer leaves out what the client
    may not see. With neither, the code for the API finds the names.
    """

    operation: Operation
    resource: Resource
    at: str = ""
    to: str = ""


class Api(NamedTuple):
    """One row of the table.

    - `needs`: the permissions that ACLs ask for, after Kafka's table of resources and operations by protocol; none: all
      may ask; None: undecided, so that with ACLs nobody may. kproxy.proxy.acl_filter enforces those of control
      requests, in this order; the code for Produce, Fetch, ListOffsets and Own enforces theirs by kproxy.proxy.access.
    - `repeatable`: a request that one broker may have carried out may be sent to another broker.
    - `names_brokers`: the answer names brokers, which the proxy replaces (kproxy.proxy.virtual_brokers).
    - `replicas`: where a part of the request names brokers for replicas; a proxy holds none.
    - `of_broker`: the field of each result that the answer prefixes with the id of the result's broker (ALL_BROKERS).
    - `waits`: the answer may wait for other members of a group, for minutes.
    - `ends_here`: whether the proxy answers itself, if it has the means, where its brokers have these APIs in common.
    """

    handling: Handling
    versions: Range = NOT_SERVED
    needs: tuple[Permission, ...] | None = None
    repeatable: bool = True
    names_brokers: bool = False
    replicas: str = ""
    of_broker: str = ""
    waits: bool = False
    ends_here: Callable[[Ranges], bool] | None = None
    note: str = ""

    @property
    def parts(self) -> tuple[str, str]:
        """The fields of the request with its parts, and of the answer with their results; empty if there are none."""
        return next(((need.at, need.to) for need in self.needs or () if need.to), ("", ""))

    @property
    def is_divided(self) -> bool:
        """Whether parts of a request may go to different brokers (kproxy.proxy.distribution)."""
        return self.handling in _DIVIDED or bool(self.replicas)

    @property
    def min_version(self) -> int:
        return self.versions[0]

    @property
    def max_version(self) -> int:
        return self.versions[1]


_READ_TOPIC: Final = Permission(Operation.READ, Resource.TOPIC)
_WRITE_TOPIC: Final = Permission(Operation.WRITE, Resource.TOPIC)
_DESCRIBE_TOPIC: Final = Permission(Operation.DESCRIBE, Resource.TOPIC)
_CREATE_TOPIC: Final = Permission(Operation.CREATE, Resource.TOPIC)
_READ_GROUP: Final = Permission(Operation.READ, Resource.GROUP, "group_id")
_DESCRIBE_GROUP: Final = Permission(Operation.DESCRIBE, Resource.GROUP, "group_id")
_OWN_GROUP: Final = Permission(Operation.OWN, Resource.GROUP)
_WRITE_TRANSACTION: Final = Permission(Operation.WRITE, Resource.TRANSACTIONAL_ID, "transactional_id")
_DESCRIBE_TRANSACTION: Final = Permission(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID)
_DESCRIBE_CLUSTER: Final = Permission(Operation.DESCRIBE, Resource.CLUSTER)
_ALTER_CLUSTER: Final = Permission(Operation.ALTER, Resource.CLUSTER)
_BROKERS_OWN_ACLS: Final = (
    "The ACLs are the brokers' own. Where the proxy's ACLs tell clients apart: refused with SECURITY_DISABLED."
)
_NO_REPLICAS: Final = "A proxy's node id among the replicas gets INVALID_REPLICA_ASSIGNMENT."
_FOR_ALL: Final = "Everybody may ask, as in Kafka."

_WITHOUT_EPOCHS: Final = "Without leader epochs."

_REFUSED: Final = Api(Handling.REFUSED)


def _each_topic(operation: Operation, at: str = "topics", to: str = "topics") -> Permission:
    return Permission(operation, Resource.TOPIC, at, to)


def _each_group(operation: Operation, at: str = "", to: str = "groups") -> Permission:
    return Permission(operation, Resource.GROUP, at, to)


def _administers(*parts: str, note: str = "", replicas: str = "", versions: Range = (0, 0)) -> Api:
    """Return the row of an API that changes the cluster."""
    needs = (_ALTER_CLUSTER._replace(at=parts[0], to=parts[1]) if parts else _ALTER_CLUSTER,)
    return Api(Handling.ANY_BROKER, versions, needs, repeatable=False, replicas=replicas, note=note)


def _describes_cluster(versions: Range, note: str = "") -> Api:
    return Api(Handling.ANY_BROKER, versions, (_DESCRIBE_CLUSTER,), note=note)


def _alters_configs(versions: Range) -> Api:
    return Api(
        Handling.NAMED_BROKER,
        versions,
        needs=(
            _each_topic(Operation.ALTER, "resources", "responses"),
            _DESCRIBE_GROUP._replace(operation=Operation.ALTER, at=""),
            _ALTER_CLUSTER,
        ),
        repeatable=False,
        note="A proxy's configuration cannot be altered: its node id gets INVALID_REQUEST.",
    )


def _sasl(api_key: int) -> Api:
    return Api(
        Handling.PROXY,
        SASL_APIS[api_key],
        repeatable=False,
        ends_here=lambda common: True,
        note="Offered where clients authenticate by SASL. Without it the connection is closed, and the log names the"
        " client setting: security.protocol=PLAINTEXT.",
    )


APIS: Final[Mapping[int, Api]] = MappingProxyType(
    {
        # With a higher minimum librdkafka drops gzip and lz4.
        keys.PRODUCE: Api(
            Handling.SPLIT,
            (0, produce.MAX_VERSION),
            needs=(_WRITE_TOPIC, _WRITE_TRANSACTION),
            note="Versions 0 to 2 are offered and refused when sent, as in Kafka 4. Version 13, which names topics by"
            " id, is offered where the ids are known.",
        ),
        keys.FETCH: Api(
            Handling.SPLIT,
            (fetch.MIN_VERSION, fetch.MAX_VERSION),
            needs=(_READ_TOPIC,),
            note="Versions from 13 on, which name topics by id, are offered where the ids are known. There are no fetch"
            " sessions (KIP-227) and no racks (KIP-392).",
        ),
        keys.LIST_OFFSETS: Api(
            Handling.SPLIT, (list_offsets.MIN_VERSION, list_offsets.MAX_VERSION), needs=(_DESCRIBE_TOPIC,)
        ),
        keys.METADATA: Api(
            Handling.ANY_BROKER,
            (0, 13),
            needs=(_DESCRIBE_TOPIC, _CREATE_TOPIC),
            names_brokers=True,
            note="Where no broker answers, each topic gets LEADER_NOT_AVAILABLE.",
        ),
        keys.OFFSET_COMMIT: Api(
            Handling.GROUP_COORDINATOR,
            (2, OFFSETS_BY_ID_FROM),
            needs=(_READ_GROUP, _each_topic(Operation.READ)),
            note=f"{_WITHOUT_EPOCHS} Version 10, which names topics by id, is offered where the ids are known.",
        ),
        keys.OFFSET_FETCH: Api(
            Handling.GROUP_COORDINATOR,
            (1, OFFSETS_BY_ID_FROM),
            needs=(_DESCRIBE_GROUP, _each_topic(Operation.DESCRIBE)),
            note=f"{_WITHOUT_EPOCHS} From version 8 on each group goes to its own coordinator (KIP-709). Version 10 as"
            " for OffsetCommit.",
        ),
        keys.FIND_COORDINATOR: Api(
            Handling.ANY_BROKER,
            (0, 6),
            needs=(_DESCRIBE_GROUP, _DESCRIBE_TRANSACTION),
            names_brokers=True,
            # Clients find the proxy, which knows the holders of the groups' leases. Transactions have no leases.
            # Brokers that keep fences, the reference brokers, tell of coordinators themselves: there leases are hints.
            ends_here=lambda common: keys.JOIN_GROUP in common and not common.keys() & {keys.END_TXN, keys.BIND_FENCES},
            note="Ended here where groups have leases in etcd and brokers keep no transactions (KafScale).",
        ),
        keys.JOIN_GROUP: Api(Handling.GROUP_COORDINATOR, (0, 9), needs=(_READ_GROUP,), waits=True),
        keys.HEARTBEAT: Api(Handling.GROUP_COORDINATOR, (0, 4), needs=(_READ_GROUP,)),
        keys.LEAVE_GROUP: Api(Handling.GROUP_COORDINATOR, (0, 5), needs=(_READ_GROUP,)),
        keys.SYNC_GROUP: Api(Handling.GROUP_COORDINATOR, (0, 5), needs=(_READ_GROUP,), waits=True),
        keys.DESCRIBE_GROUPS: Api(Handling.EACH_GROUP, (0, 6), needs=(_each_group(Operation.DESCRIBE, "groups"),)),
        keys.LIST_GROUPS: Api(
            Handling.ALL_BROKERS,
            (0, 5),
            needs=(_each_group(Operation.DESCRIBE),),
            note="Who may describe the cluster sees all groups. For a broker that does not answer the error is"
            " COORDINATOR_NOT_AVAILABLE.",
        ),
        keys.SASL_HANDSHAKE: _sasl(keys.SASL_HANDSHAKE),
        keys.API_VERSIONS: Api(
            Handling.PROXY, (0, 4), note="Other versions are answered in version 0 with UNSUPPORTED_VERSION (KIP-511)."
        ),
        keys.CREATE_TOPICS: Api(
            Handling.ANY_BROKER,
            (2, 7),
            needs=(_each_topic(Operation.CREATE),),
            repeatable=False,
            replicas="assignments.broker_ids",
            note=_NO_REPLICAS,
        ),
        keys.DELETE_TOPICS: Api(
            Handling.ANY_BROKER,
            (1, 6),
            needs=(_each_topic(Operation.DELETE, "topic_names", "responses"),),
            repeatable=False,
        ),
        keys.DELETE_RECORDS: Api(Handling.EACH_OWNER, (0, 2), needs=(_each_topic(Operation.DELETE),), repeatable=False),
        keys.INIT_PRODUCER_ID: Api(
            Handling.TRANSACTION_COORDINATOR,
            (0, 5),
            needs=(_WRITE_TRANSACTION,),
            # Brokers that assign producer ids use them to recognise a batch that is sent again.
            ends_here=lambda common: keys.INIT_PRODUCER_ID not in common,
            note="Any broker answers a request without a transactional id. Where brokers give out no producer ids"
            " (KafScale), it is ended here, with ids from etcd.",
        ),
        keys.OFFSET_FOR_LEADER_EPOCH: Api(
            Handling.EACH_OWNER,
            (2, 4),
            needs=(_each_topic(Operation.DESCRIBE),),
            note="The epochs are the brokers' own; no other answer of the proxy has them.",
        ),
        keys.ADD_PARTITIONS_TO_TXN: Api(
            Handling.TRANSACTION_COORDINATOR,
            (0, 3),
            needs=(
                _WRITE_TRANSACTION._replace(at="v3_and_below_transactional_id"),
                _each_topic(Operation.WRITE, "v3_and_below_topics", "results_by_topic_v3_and_below"),
            ),
            note="Versions from 4 on are for brokers alone: Kafka requires ClusterAction for them.",
        ),
        keys.ADD_OFFSETS_TO_TXN: Api(Handling.TRANSACTION_COORDINATOR, (0, 4), needs=(_WRITE_TRANSACTION, _READ_GROUP)),
        keys.END_TXN: Api(Handling.TRANSACTION_COORDINATOR, (0, 5), needs=(_WRITE_TRANSACTION,)),
        keys.WRITE_TXN_MARKERS: _REFUSED,
        keys.TXN_OFFSET_COMMIT: Api(
            Handling.GROUP_COORDINATOR,
            (0, 5),
            needs=(_WRITE_TRANSACTION, _READ_GROUP, _each_topic(Operation.READ)),
            note=_WITHOUT_EPOCHS,
        ),
        keys.DESCRIBE_ACLS: _describes_cluster((1, 3), _BROKERS_OWN_ACLS),
        keys.CREATE_ACLS: _administers("creations", "results", versions=(1, 3), note=_BROKERS_OWN_ACLS),
        keys.DELETE_ACLS: _administers("filters", "filter_results", versions=(1, 3), note=_BROKERS_OWN_ACLS),
        keys.DESCRIBE_CONFIGS: Api(
            Handling.NAMED_BROKER,
            (1, 4),
            needs=(
                _each_topic(Operation.DESCRIBE, "resources", "results"),
                _DESCRIBE_GROUP._replace(at=""),
                _DESCRIBE_CLUSTER,
            ),
            note="A proxy's node id stands for one of the brokers.",
        ),
        keys.ALTER_CONFIGS: _alters_configs((0, 2)),
        keys.ALTER_REPLICA_LOG_DIRS: _REFUSED,
        keys.DESCRIBE_LOG_DIRS: Api(
            Handling.ALL_BROKERS,
            (3, 5),
            needs=(_DESCRIBE_CLUSTER._replace(to="results"),),
            of_broker="log_dir",
            note="Each proxy tells the directories of all brokers, as ID:DIRECTORY. Before version 3 an answer has no"
            " place for an error.",
        ),
        keys.SASL_AUTHENTICATE: _sasl(keys.SASL_AUTHENTICATE),
        keys.CREATE_PARTITIONS: Api(
            Handling.ANY_BROKER,
            (0, 3),
            needs=(_each_topic(Operation.ALTER, to="results"),),
            repeatable=False,
            replicas="assignments.broker_ids",
            note=_NO_REPLICAS,
        ),
        keys.CREATE_DELEGATION_TOKEN: _REFUSED,
        keys.RENEW_DELEGATION_TOKEN: _REFUSED,
        keys.EXPIRE_DELEGATION_TOKEN: _REFUSED,
        keys.DESCRIBE_DELEGATION_TOKEN: _REFUSED,
        keys.DELETE_GROUPS: Api(
            Handling.EACH_GROUP,
            (0, 2),
            needs=(_each_group(Operation.DELETE, "groups_names", "results"),),
            repeatable=False,
        ),
        keys.ELECT_LEADERS: _administers(versions=(1, 2)),
        keys.INCREMENTAL_ALTER_CONFIGS: _alters_configs((0, 1)),
        keys.ALTER_PARTITION_REASSIGNMENTS: _administers(
            "topics", "responses", versions=(0, 1), replicas="partitions.replicas", note=_NO_REPLICAS
        ),
        keys.LIST_PARTITION_REASSIGNMENTS: _describes_cluster((0, 0), "The ids are the brokers' own."),
        keys.OFFSET_DELETE: Api(
            Handling.GROUP_COORDINATOR,
            (0, 0),
            needs=(_READ_GROUP._replace(operation=Operation.DELETE), _each_topic(Operation.READ)),
        ),
        keys.DESCRIBE_CLIENT_QUOTAS: _describes_cluster((0, 1), "The quotas are the brokers' own."),
        keys.ALTER_CLIENT_QUOTAS: _administers(
            "entries", "entries", versions=(0, 1), note="The quotas are the brokers' own."
        ),
        keys.DESCRIBE_USER_SCRAM_CREDENTIALS: _describes_cluster((0, 0), "The users are the brokers' own."),
        keys.ALTER_USER_SCRAM_CREDENTIALS: _administers(
            "deletions upsertions", "results", note="The users are the brokers' own."
        ),
        keys.DESCRIBE_QUORUM: _describes_cluster((0, 1), "Version 2 has the addresses of controllers."),
        keys.UPDATE_FEATURES: _administers(versions=(0, 2)),
        keys.ENVELOPE: _REFUSED,
        keys.DESCRIBE_CLUSTER: Api(
            Handling.ANY_BROKER, (0, 2), (), names_brokers=True, note=f"{_FOR_ALL} No proxy is fenced."
        ),
        keys.DESCRIBE_PRODUCERS: Api(Handling.EACH_OWNER, (0, 0), needs=(_each_topic(Operation.READ),)),
        keys.DESCRIBE_TRANSACTIONS: Api(
            Handling.EACH_TRANSACTION,
            (0, 0),
            needs=(
                _DESCRIBE_TRANSACTION._replace(at="transactional_ids", to="transaction_states"),
                _each_topic(Operation.DESCRIBE, "", "transaction_states.topics"),
            ),
        ),
        keys.LIST_TRANSACTIONS: Api(
            Handling.ALL_BROKERS, (0, 2), needs=(_DESCRIBE_TRANSACTION._replace(to="transaction_states"),)
        ),
        keys.CONSUMER_GROUP_HEARTBEAT: Api(
            Handling.GROUP_COORDINATOR,
            (0, 1),
            needs=(_READ_GROUP, _DESCRIBE_TOPIC),
            note="Where the proxy's ACLs tell clients apart, a regular expression for topics, which brokers would"
            " resolve, gets TOPIC_AUTHORIZATION_FAILED.",
        ),
        keys.CONSUMER_GROUP_DESCRIBE: Api(
            Handling.EACH_GROUP,
            (0, 1),
            needs=(_each_group(Operation.DESCRIBE, "group_ids"), _DESCRIBE_TOPIC),
        ),
        keys.GET_TELEMETRY_SUBSCRIPTIONS: Api(Handling.ANY_BROKER, (0, 0), (), note=_FOR_ALL),
        keys.PUSH_TELEMETRY: Api(Handling.ANY_BROKER, (0, 0), (), note=_FOR_ALL),
        keys.LIST_CONFIG_RESOURCES: Api(Handling.ANY_BROKER, (0, 1), (_DESCRIBE_CLUSTER,), names_brokers=True),
        keys.DESCRIBE_TOPIC_PARTITIONS: Api(Handling.ANY_BROKER, (0, 0), needs=(_DESCRIBE_TOPIC,), names_brokers=True),
        keys.OWN: Api(
            Handling.PROXY,
            (own.OWN_MIN_VERSION, own.OWN_MAX_VERSION),
            needs=(_OWN_GROUP,),
            repeatable=False,
            ends_here=lambda common: True,
            note="kproxy's own: claims of a single writer or reader. Offered where the proxy has an etcd.",
        ),
        keys.BIND_FENCES: Api(Handling.REFUSED, note="kproxy's own: the proxy sends it to brokers."),
    }
)

SERVED: Final[Mapping[int, Api]] = MappingProxyType(
    {key: api for key, api in APIS.items() if api.handling is not Handling.REFUSED}
)
"""The rows of the APIs that the proxy serves, by key."""

_OFFSETS_OF_GROUPS: Final = Api(Handling.EACH_GROUP, needs=(_each_group(Operation.DESCRIBE, "groups"),))


def api_of(api_key: int, api_version: int) -> Api:
    """The row of a request. An OffsetFetch that may name several groups is divided as other requests about groups."""
    return _OFFSETS_OF_GROUPS if names_groups(api_key, api_version) else APIS[api_key]


FEATURES: Final[Mapping[str, Mapping[int, Ranges]]] = MappingProxyType(
    {
        # Tools show it as the version of the cluster.
        "metadata.version": {},
        # From level 2 on a client leaves out AddPartitionsToTxn, and uses newer versions of other requests (KIP-890).
        "transaction.version": {
            1: {keys.END_TXN: (0, 0)},
            2: {keys.PRODUCE: (12, 12), keys.END_TXN: (5, 5), keys.TXN_OFFSET_COMMIT: (5, 5)},
        },
        "group.version": {1: {keys.CONSUMER_GROUP_HEARTBEAT: (0, 0)}},
    }
)
"""The brokers' features (KIP-584) that clients are told of, with what must be offered from each level on.

Others are left out, because what they promise is not served: share.version, streams.version, kraft.version (the
quorum), eligible.leader.replicas.version.
"""

NAMED_AND_REFUSED: Final[Mapping[int, Range]] = MappingProxyType({keys.CONSUMER_GROUP_HEARTBEAT: (0, 1)})
"""Named in ApiVersions where there are groups, also if it is not served; see the row."""


def proxy_ranges() -> Ranges:
    """Return the versions that the proxy itself serves."""
    return {key: api.versions for key, api in SERVED.items()}
