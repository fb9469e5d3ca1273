"""Declare how the proxy serves each API of Kafka's protocol.

`APIS` has one row for each API key that has a name. It dispatches requests, gives ApiVersions its versions
(kproxy.proxy.api_versions), and scripts/protocol_support.py writes docs/protocol-support.md from it.

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
from kproxy_codec.coordination import GROUP, OFFSETS_BY_ID_FROM, TRANSACTION

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
    GROUP_COORDINATOR = "group coordinator"
    TRANSACTION_COORDINATOR = "transaction coordinator"
    ANY_BROKER = "any broker"
    REFUSED = "refused"


KEY_TYPES: Final[Mapping[Handling, int]] = MappingProxyType(
    {Handling.GROUP_COORDINATOR: GROUP, Handling.TRANSACTION_COORDINATOR: TRANSACTION}
)
"""Key types of FindCoordinator, for requests that go to a coordinator."""


class Permission(NamedTuple):
    """`operation` on each resource of this kind that a request names.

    `at`: the field of the request with the name, or with topics; empty: the API's handler finds them. `to`: the field
    of the answer with the results of refused topics; empty: the whole request is refused.
    """

    operation: Operation
    resource: Resource
    at: str = ""
    to: str = ""


class Api(NamedTuple):
    """One row of the table.

    - `needs`: the permissions that ACLs ask for, after Kafka's table of resources and operations by protocol.
      kproxy.proxy.acl_filter enforces those of APIs that brokers answer, in this order; kproxy.proxy.access enforces
      the others where the API is handled.
    - `repeatable`: a request that one broker may have carried out may be sent to another broker.
    - `names_brokers`: the answer names brokers, which the proxy replaces (kproxy.proxy.virtual_brokers).
    - `waits`: the answer may wait for other members of a group, for minutes.
    - `ends_here`: whether the proxy answers itself before brokers with these APIs in common, given the means for it.
    """

    handling: Handling
    versions: Range = NOT_SERVED
    needs: tuple[Permission, ...] = ()
    repeatable: bool = True
    names_brokers: bool = False
    waits: bool = False
    ends_here: Callable[[Ranges], bool] | None = None
    note: str = ""

    @property
    def parts(self) -> tuple[str, str]:
        """The fields of the request with its parts, and of the answer with their results; empty if there are none."""
        return next(((need.at, need.to) for need in self.needs or () if need.to), ("", ""))

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

_WITHOUT_EPOCHS: Final = "Without leader epochs."

_REFUSED: Final = Api(Handling.REFUSED)


def _each_topic(operation: Operation, at: str = "topics", to: str = "topics") -> Permission:
    return Permission(operation, Resource.TOPIC, at, to)


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
            # Brokers that keep fences, the reference brokers, tell of coordinators themselves.
            ends_here=lambda common: keys.JOIN_GROUP in common and not common.keys() & {keys.END_TXN, keys.BIND_FENCES},
            note="Ended here where groups have leases in etcd and brokers keep no transactions (KafScale).",
        ),
        keys.JOIN_GROUP: Api(Handling.GROUP_COORDINATOR, (0, 9), needs=(_READ_GROUP,), waits=True),
        keys.HEARTBEAT: Api(Handling.GROUP_COORDINATOR, (0, 4), needs=(_READ_GROUP,)),
        keys.LEAVE_GROUP: Api(Handling.GROUP_COORDINATOR, (0, 5), needs=(_READ_GROUP,)),
        keys.SYNC_GROUP: Api(Handling.GROUP_COORDINATOR, (0, 5), needs=(_READ_GROUP,), waits=True),
        keys.DESCRIBE_GROUPS: _REFUSED,
        keys.LIST_GROUPS: _REFUSED,
        keys.SASL_HANDSHAKE: _sasl(keys.SASL_HANDSHAKE),
        keys.API_VERSIONS: Api(
            Handling.PROXY, (0, 4), note="Other versions are answered in version 0 with UNSUPPORTED_VERSION (KIP-511)."
        ),
        keys.CREATE_TOPICS: Api(Handling.ANY_BROKER, (2, 7), needs=(_each_topic(Operation.CREATE),), repeatable=False),
        keys.DELETE_TOPICS: Api(
            Handling.ANY_BROKER,
            (1, 6),
            needs=(_each_topic(Operation.DELETE, "topic_names", "responses"),),
            repeatable=False,
        ),
        keys.DELETE_RECORDS: _REFUSED,
        keys.INIT_PRODUCER_ID: Api(
            Handling.TRANSACTION_COORDINATOR,
            (0, 5),
            needs=(_WRITE_TRANSACTION,),
            # Brokers that assign producer ids use them to recognise a batch that is sent again.
            ends_here=lambda common: keys.INIT_PRODUCER_ID not in common,
            note="Any broker answers a request without a transactional id. Where brokers give out no producer ids"
            " (KafScale), it is ended here, with ids from etcd.",
        ),
        keys.OFFSET_FOR_LEADER_EPOCH: _REFUSED,
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
        keys.DESCRIBE_ACLS: _REFUSED,
        keys.CREATE_ACLS: _REFUSED,
        keys.DELETE_ACLS: _REFUSED,
        keys.DESCRIBE_CONFIGS: Api(
            Handling.ANY_BROKER,
            (1, 4),
            needs=(_DESCRIBE_TOPIC, _DESCRIBE_CLUSTER),
            note="A proxy's node id stands for one of the brokers.",
        ),
        keys.ALTER_CONFIGS: _REFUSED,
        keys.ALTER_REPLICA_LOG_DIRS: _REFUSED,
        keys.DESCRIBE_LOG_DIRS: _REFUSED,
        keys.SASL_AUTHENTICATE: _sasl(keys.SASL_AUTHENTICATE),
        keys.CREATE_PARTITIONS: Api(
            Handling.ANY_BROKER, (0, 3), needs=(_each_topic(Operation.ALTER, to="results"),), repeatable=False
        ),
        keys.CREATE_DELEGATION_TOKEN: _REFUSED,
        keys.RENEW_DELEGATION_TOKEN: _REFUSED,
        keys.EXPIRE_DELEGATION_TOKEN: _REFUSED,
        keys.DESCRIBE_DELEGATION_TOKEN: _REFUSED,
        keys.DELETE_GROUPS: _REFUSED,
        keys.ELECT_LEADERS: _REFUSED,
        keys.INCREMENTAL_ALTER_CONFIGS: _REFUSED,
        keys.ALTER_PARTITION_REASSIGNMENTS: _REFUSED,
        keys.LIST_PARTITION_REASSIGNMENTS: _REFUSED,
        keys.OFFSET_DELETE: _REFUSED,
        keys.DESCRIBE_CLIENT_QUOTAS: _REFUSED,
        keys.ALTER_CLIENT_QUOTAS: _REFUSED,
        keys.DESCRIBE_USER_SCRAM_CREDENTIALS: _REFUSED,
        keys.ALTER_USER_SCRAM_CREDENTIALS: _REFUSED,
        keys.DESCRIBE_QUORUM: _REFUSED,
        keys.UPDATE_FEATURES: _REFUSED,
        keys.ENVELOPE: _REFUSED,
        keys.DESCRIBE_CLUSTER: Api(
            Handling.ANY_BROKER, (0, 2), names_brokers=True, note="Everybody may ask, as in Kafka. No proxy is fenced."
        ),
        keys.DESCRIBE_PRODUCERS: _REFUSED,
        keys.DESCRIBE_TRANSACTIONS: _REFUSED,
        keys.LIST_TRANSACTIONS: _REFUSED,
        keys.CONSUMER_GROUP_HEARTBEAT: Api(
            Handling.REFUSED,
            note="ApiVersions names it where there are groups, and it gets UNSUPPORTED_VERSION, as from Kafka without"
            " group.version: librdkafka reports nothing where it is not named.",
        ),
        keys.CONSUMER_GROUP_DESCRIBE: _REFUSED,
        keys.GET_TELEMETRY_SUBSCRIPTIONS: _REFUSED,
        keys.PUSH_TELEMETRY: _REFUSED,
        keys.LIST_CONFIG_RESOURCES: _REFUSED,
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
