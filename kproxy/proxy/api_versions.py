"""Work out which API versions to offer to clients.

`offer` returns the versions that the proxy (kproxy.proxy.apis) and all upstream brokers serve. `ask_versions` asks a
broker with ApiVersions (KIP-35); kproxy.proxy.broker_watch decides when.

A client whose versions are configured may send others. They are answered with UNSUPPORTED_VERSION, in the form of the
request's own version. Kafka closes the connection instead; such a client then connects again many times a second, and
reports nothing to its application. The proxy closes the connection only if it does not know the version, or the answer
has no place for an error.

The proxy answers some APIs itself where brokers leave them to it (`Api.ends_here`). It then offers its own versions,
whatever brokers serve.

Features (KIP-584) are the brokers' common ones, at the levels whose requests are offered (`FEATURES`): a client that is
told of a higher level and may not send them aborts its transactions, or reads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kproxy.proxy.apis import (
    APIS,
    FEATURES,
    NAMED_AND_REFUSED,
    NO_RANGES,
    NOT_SERVED,
    SERVED,
    Range,
    Ranges,
    proxy_ranges,
)
from kproxy.proxy.broker_connection import Upstream, ask
from kproxy_codec import api_keys as keys
from kproxy_codec import foreign
from kproxy_codec.api_keys import is_flexible
from kproxy_codec.control import Message, build_request, build_response, decode_response, encode_request, is_known
from kproxy_codec.error_codes import INVALID_REQUEST, NONE, UNSUPPORTED_VERSION
from kproxy_codec.errors import InvalidField, UnsupportedVersion
from kproxy_codec.framing import RequestHeader, request_header, response_body_offset
from kproxy_codec.own import BIND_FENCES_VERSION
from kproxy_codec.partitioned import with_length
from kproxy_codec.walk import Walk

# Version 4 names all features. Older brokers answer it in version 0 with an error (KIP-511), or close the connection.
ASKED_VERSIONS: Final = (4, 0)
_SOFTWARE_PATTERN: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_SOFTWARE: Final = {"client_software_name": "kproxy", "client_software_version": "1"}
PRODUCER_IDS: Final[Ranges] = {keys.INIT_PRODUCER_ID: (0, 0)}
FENCES: Final[Ranges] = {keys.BIND_FENCES: (BIND_FENCES_VERSION, BIND_FENCES_VERSION)}

# Offered where the proxy has the means for them, whatever brokers serve.
_ONLY_OURS: Final = frozenset({keys.OWN, keys.SASL_HANDSHAKE, keys.SASL_AUTHENTICATE})

_UNKNOWN_EPOCH: Final = -1
NO_CAPS: Final[Mapping[int, int]] = MappingProxyType({})

# Versions of ApiVersions: the client's software in requests; features in answers.
_SOFTWARE_FROM: Final = 3
_FEATURES_FROM: Final = 3
# More than the levels in FEATURES that may be withheld.
_EPOCHS_FOR_ONE: Final = 8
# Up to this version an answer cannot name a feature that is supported from level 0 (KIP-1022).
_NO_LEVEL_0_TO: Final = 3


class BrokerApis(NamedTuple):
    """The APIs that one broker says it serves.

    `ranges` are versions by API key; features are lowest and highest levels by name. `epoch` counts the changes of the
    finalized features, which are the cluster's; -1 where they are not known.
    """

    ranges: Ranges
    supported: Mapping[str, Range] = MappingProxyType({})
    finalized: Mapping[str, Range] = MappingProxyType({})
    epoch: int = _UNKNOWN_EPOCH

    def without(self, api_keys: Collection[int]) -> BrokerApis:
        """Return a copy that lacks these APIs."""
        return self._replace(ranges={key: span for key, span in self.ranges.items() if key not in api_keys})


class OfferedApis(NamedTuple):
    """The APIs that clients are offered, with fields as in `BrokerApis`.

    `native` are APIs that the proxy answers itself, and that brokers might have answered.
    """

    ranges: Ranges
    supported: Mapping[str, Range]
    finalized: Mapping[str, Range]
    epoch: int
    native: frozenset[int] = frozenset()


def intersect(upstreams: Iterable[Ranges], caps: Mapping[int, int] = NO_CAPS) -> Ranges:
    """Return the versions that the proxy and all `upstreams` serve.

    `caps` are highest versions by API key. The range of ApiVersions is the proxy's. Produce keeps its minimum of 0,
    whatever brokers serve (see kproxy.proxy.apis).
    """
    offered = {
        key: (lowest, min(highest, caps.get(key, highest)))
        for key, (lowest, highest) in proxy_ranges().items()
        if key not in _ONLY_OURS
    }
    for upstream in upstreams:
        for key, (lowest, highest) in list(offered.items()):
            if key == keys.API_VERSIONS:
                continue
            theirs = upstream.get(key)
            common = None if theirs is None else (max(lowest, theirs[0]), min(highest, theirs[1]))
            if common is None or common[0] > common[1]:
                del offered[key]
            else:
                offered[key] = (0 if key == keys.PRODUCE else common[0], common[1])
    return offered


def offer(
    brokers: Sequence[BrokerApis], caps: Mapping[int, int] = NO_CAPS, can_answer: Mapping[int, Range] = NO_RANGES
) -> OfferedApis:
    """Work out what to offer before these brokers.

    `can_answer` are the APIs, and their versions, that the proxy has the means to answer itself.

    Finalized features are those of the broker with the highest epoch. The epoch rises with each level that is withheld:
    clients that have seen a higher level accept a lower one only with a higher epoch.
    """
    ranges = intersect((broker.ranges for broker in brokers), caps)
    fences = FENCES if brokers and all(covers(broker.ranges, FENCES) for broker in brokers) else NO_RANGES
    native = frozenset(key for key in can_answer if _ends_here(key, {**ranges, **fences}))
    ranges |= {key: can_answer[key] for key in native}
    supported = _common_features([broker.supported for broker in brokers])
    latest = max(brokers, key=lambda broker: broker.epoch, default=BrokerApis({}))
    finalized = dict(latest.finalized)
    withheld = _withhold(finalized, ranges)
    _withhold(supported, ranges)
    epoch = _UNKNOWN_EPOCH if latest.epoch < 0 else _EPOCHS_FOR_ONE * latest.epoch + withheld
    return OfferedApis(ranges, supported, finalized, epoch, native)


def _ends_here(api_key: int, common: Ranges) -> bool:
    ends_here = APIS[api_key].ends_here
    return ends_here is not None and ends_here(common)


def _common_features(brokers: Sequence[Mapping[str, Range]]) -> dict[str, Range]:
    common = dict(brokers[0]) if brokers else {}
    for broker in brokers[1:]:
        for name, (lowest, highest) in list(common.items()):
            theirs = broker.get(name, NOT_SERVED)
            common[name] = (max(lowest, theirs[0]), min(highest, theirs[1]))
            if common[name][0] > common[name][1]:
                del common[name]
    return common


def _withhold(features: dict[str, Range], ranges: Ranges) -> int:
    """Lower features to the levels that clients can use with these versions; return the number of levels withheld.

    Level 0, and features that `FEATURES` lacks, are left out.
    """
    withheld = 0
    for name, (lowest, highest) in list(features.items()):
        needs = FEATURES.get(name)
        usable = min(
            (level - 1 for level, wanted in (needs or {}).items() if not covers(ranges, wanted)), default=highest
        )
        withheld += max(0, highest - usable)
        if needs is None or usable == 0:
            del features[name]
        elif usable < highest:
            features[name] = (min(lowest, usable), usable)
    return withheld


def covers(offered: Ranges, wanted: Ranges) -> bool:
    """Return whether all of `wanted` lies within `offered`."""
    for key, (lowest, highest) in wanted.items():
        theirs = offered.get(key, NOT_SERVED)
        if not theirs[0] <= lowest <= highest <= theirs[1]:
            return False
    return True


def check_served(header: RequestHeader, ranges: Ranges) -> str:
    """Return why a request is refused with UNSUPPORTED_VERSION; empty if it is in `ranges`.

    ApiVersions is allowed in any version (KIP-511). Raises UnsupportedVersion for a request that is not known, and
    ForeignProtocol for SASL.
    """
    key, version = header.api_key, header.api_version
    lowest, highest = ranges.get(key, NOT_SERVED)
    if lowest <= version <= highest or key == keys.API_VERSIONS:
        return ""
    name = keys.name_of(key)
    if key in (keys.SASL_HANDSHAKE, keys.SASL_AUTHENTICATE):
        raise foreign.sasl(header)
    offered = f" v{version}: versions {lowest} to {highest} are offered" if key in ranges else " is not offered"
    named = NAMED_AND_REFUSED.get(key, NOT_SERVED)
    is_named = named[0] <= version <= named[1]
    if not is_named and (key not in SERVED or key == keys.OWN or not is_known(key, version)):
        raise UnsupportedVersion(name + offered)
    return name + offered


# Answers to clients


def unsupported_version_response() -> Message:
    """Answer ApiVersions of a version that is not served.

    The answer is of version 0, and names the versions that are served (KIP-511).
    """
    lowest, highest = APIS[keys.API_VERSIONS].versions
    mine = {"api_key": keys.API_VERSIONS, "min_version": lowest, "max_version": highest}
    return build_response(keys.API_VERSIONS, 0, error_code=UNSUPPORTED_VERSION, api_keys=[mine])


def check_api_versions_request(header: RequestHeader, body: memoryview) -> tuple[int, str]:
    """Return the error code of a request, and the client's software; its name and version must match Kafka's pattern.

    Raises CodecError for a malformed request.
    """
    walk = Walk(body, compact=is_flexible(keys.API_VERSIONS, header.api_version))
    software = [walk.text() or "", walk.text() or ""] if walk.compact else []
    walk.end()
    return NONE if all(map(_SOFTWARE_PATTERN.fullmatch, software)) else INVALID_REQUEST, " ".join(software)


def offered_response(api_version: int, offered: OfferedApis) -> Message:
    """Build the answer to ApiVersions, of a version that is served."""
    refused = NAMED_AND_REFUSED if keys.JOIN_GROUP in offered.ranges else NO_RANGES
    fields: dict[str, Any] = {
        "api_keys": [
            {"api_key": key, "min_version": lowest, "max_version": highest}
            for key, (lowest, highest) in sorted({**refused, **offered.ranges}.items())
        ]
    }
    if api_version >= _FEATURES_FROM:
        fields["supported_features"] = [
            {"name": name, "min_version": lowest, "max_version": highest}
            for name, (lowest, highest) in sorted(offered.supported.items())
            if lowest > 0 or api_version > _NO_LEVEL_0_TO
        ]
        fields["finalized_features_epoch"] = offered.epoch
        fields["finalized_features"] = [
            {"name": name, "min_version_level": lowest, "max_version_level": highest}
            for name, (lowest, highest) in sorted(offered.finalized.items())
        ]
    return build_response(keys.API_VERSIONS, api_version, **fields)


# Answers of brokers


async def ask_versions(connection: Upstream, version: int, client_id: bytes) -> BrokerApis:
    """Ask a broker in one version of ApiVersions.

    Raises Lost, and CodecError for a malformed answer or an error code.
    """
    correlation_id = connection.next_correlation_id()
    head = request_header(keys.API_VERSIONS, version, correlation_id, client_id)
    fields = _SOFTWARE if version >= _SOFTWARE_FROM else {}
    body = encode_request(build_request(keys.API_VERSIONS, version, **fields))
    answer = await ask(connection, correlation_id, with_length([head, body]))
    message = decode_response(
        keys.API_VERSIONS, version, answer[response_body_offset(answer, keys.API_VERSIONS, version) :]
    )
    if message.error_code != NONE:
        raise InvalidField(f"the broker answered ApiVersions v{version} with error {message.error_code}")
    return _broker_apis(message, version)


def _broker_apis(message: Message, version: int) -> BrokerApis:
    ranges = {api.api_key: (api.min_version, api.max_version) for api in message.api_keys}
    if version < _SOFTWARE_FROM:
        return BrokerApis(ranges)
    return BrokerApis(
        ranges,
        {each.name: (each.min_version, each.max_version) for each in message.supported_features},
        {each.name: (each.min_version_level, each.max_version_level) for each in message.finalized_features},
        message.finalized_features_epoch,
    )


def changes(before: Ranges, after: Ranges) -> dict[str, str]:
    """Describe a change for the log.

    `withdrawn` are APIs by name, `versions` the ranges of those that are new or changed.
    """
    withdrawn = ", ".join(keys.name_of(key) for key in sorted(before) if key not in after)
    changed = [key for key in sorted(after) if before.get(key) != after[key]]
    versions = ", ".join("{} {}-{}".format(keys.name_of(key), *after[key]) for key in changed)
    return {what: words for what, words in (("withdrawn", withdrawn), ("versions", versions)) if words}
