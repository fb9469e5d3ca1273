"""Copy DescribeConfigs requests and answers, and replace the names of brokers in them.

Versions 1-4. Request: resources of {resource_type INT8, resource_name, configuration_keys}, and two flags that are
copied. Answer: throttle_time_ms, results of {error_code, error_message, resource_type INT8, resource_name, configs of
{name, value, read_only, config_source, is_sensitive, synonyms of {name, value, source}, config_type (v3),
documentation (v3)}}; flexible from 4. Everything but the names is copied unchanged.

A broker describes hundreds of configurations, with documentation, so copying is in portions (`kproxy_codec.walk`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kproxy_codec.api_keys import DESCRIBE_CONFIGS, is_flexible
from kproxy_codec.primitives import INT8, INT16, INT32, Buffer, encode_count, encode_string
from kproxy_codec.walk import Walk, Work

BROKER_TYPES: Final = frozenset({4, 8})
"""The resource types whose names are node ids: brokers, and brokers' loggers."""

Rename = Callable[[int, bytes], bytes]
"""Maps the type and the name of a broker's resource to the name to write."""

_TYPE_AND_DOCUMENTATION_FROM = 3
_LEAST_RESOURCE_BYTES = 3
_LEAST_RESULT_BYTES = 6
_LEAST_CONFIG_BYTES = 6
_LEAST_SYNONYM_BYTES = 3


def rename_in_request(api_version: int, body: Buffer, rename: Rename) -> Work[bytearray]:
    """The body of a request with the names of brokers replaced. Raises CodecError."""
    walk, out = _begin(api_version, body)
    for _ in _counted(walk, _LEAST_RESOURCE_BYTES, out):
        _resource(walk, out, rename)
        start = walk.at
        for _ in range(walk.count(1, nullable=True)):
            walk.string()
            if walk.spend(1):
                yield
        walk.tags()
        out += walk.body[start : walk.at]
        if walk.spend(1):
            yield
    out += walk.body[walk.at :]
    return out


def rename_in_answer(api_version: int, body: Buffer, rename: Rename) -> Work[bytearray]:
    """The body of an answer with the names of brokers replaced. Raises CodecError."""
    walk, out = _begin(api_version, body)
    out += walk.skip(INT32.size)
    for _ in _counted(walk, _LEAST_RESULT_BYTES, out):
        start = walk.at
        walk.skip(INT16.size)
        walk.string(nullable=True)
        out += walk.body[start : walk.at]
        _resource(walk, out, rename)
        start = walk.at
        for _ in range(walk.count(_LEAST_CONFIG_BYTES)):
            synonyms = _skip_config(walk, has_documentation=api_version >= _TYPE_AND_DOCUMENTATION_FROM)
            if walk.spend(1 + synonyms):
                yield
        walk.tags()
        out += walk.body[start : walk.at]
    start = walk.at
    walk.end()
    out += walk.body[start:]
    return out


def _begin(api_version: int, body: Buffer) -> tuple[Walk, bytearray]:
    return Walk(body, compact=is_flexible(DESCRIBE_CONFIGS, api_version)), bytearray()


def _counted(walk: Walk, least_bytes: int, out: bytearray) -> range:
    count = walk.count(least_bytes)
    out += encode_count(count, compact=walk.compact)
    return range(count)


def _resource(walk: Walk, out: bytearray, rename: Rename) -> None:
    kind = walk.fixed(INT8)
    name = walk.string() or b""
    if kind in BROKER_TYPES:
        name = rename(kind, name)
    out += INT8.pack(kind) + encode_string(name, compact=walk.compact)


def _skip_config(walk: Walk, *, has_documentation: bool) -> int:
    """Skip one configuration; return the number of its synonyms."""
    walk.string()
    walk.string(nullable=True)
    walk.skip(3 * INT8.size)
    synonyms = walk.count(_LEAST_SYNONYM_BYTES)
    for _ in range(synonyms):
        walk.string()
        walk.string(nullable=True)
        walk.skip(INT8.size)
        walk.tags()
    if has_documentation:
        walk.skip(INT8.size)
        walk.string(nullable=True)
    walk.tags()
    return synonyms
