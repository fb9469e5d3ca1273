"""Divide requests into parts and merge answers, by the schemas of their messages.

A *part* is an element of an array in a request: a topic, a group, a resource. Its *result* is the element about it in
the answer. Both have the fields that name the part (NAMES). A topic's result has a result for each of its partitions.
So errors can be built, and answers of several brokers merged, for every API alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Final, TypeAlias

from kproxy_codec.control import Message, build_response, response_fields
from kproxy_codec.error_codes import NONE

Part: TypeAlias = Any
"""A structure of a message; a text or a number where that is all there is."""

NAMES: Final = (
    "name",
    "topic",
    "topic_id",
    "partition_index",
    "partition",
    "group_id",
    "transactional_id",
    "resource_name",
    "resource_type",
)
"""The fields that name a part, in requests and in answers."""
_ERROR_CODES: Final = frozenset({"error_code", "partition_error_code"})
_MESSAGE: Final = "error_message"
# Fields that are -1 beside an error; it is not the default in their schema.
_NO_OFFSETS: Final = ("low_watermark", "committed_offset")


def name_of(part: Part) -> Any:
    """The name of a part or a result: of a topic, a group, and so on; None if it has none."""
    if isinstance(part, (str, int)):
        return part
    return next((getattr(part, name) for name in NAMES if hasattr(part, name)), None)


def parts_of(request: Message, at: str) -> list[Part]:
    """The parts in the fields `at`, which are separated by spaces."""
    return [part for field in at.split() for part in getattr(request, field) or ()]


def may_have_parts(request: Message, at: str) -> bool:
    """Whether requests of this version have one of the fields `at`."""
    return any(request._struct.fields[field].for_version_q(request.version) for field in at.split())


def partitions_of(topic: Part) -> list[Part]:
    """The partitions of a topic in a request or an answer."""
    return getattr(topic, _array_of(topic) or "", None) or []


def changed(item: Part, **fields: object) -> Part:
    """A copy of a structure, or of a whole message, with other values of these fields."""
    copied = copy(item)
    for name, value in fields.items():
        setattr(copied, name, value)
    return copied


def only(topic: Part, chosen: Sequence[Part]) -> Part:
    """A copy of a topic with these partitions alone."""
    return changed(topic, **{_array_of(topic) or "": list(chosen)})


def numbers(item: Part, path: str) -> Iterator[int]:
    """The numbers at the end of a path of fields, such as `assignments.broker_ids`; arrays on it may be null."""
    field, _, rest = path.partition(".")
    for each in getattr(item, field) or ():
        if rest:
            yield from numbers(each, rest)
        else:
            yield each


def keep(answer: Message, path: str, is_kept: Callable[[Part], bool]) -> None:
    """Remove from the array at the end of a path of fields the elements that are not kept."""
    *outer, last = path.split(".")
    holders = [answer]
    for field in outer:
        holders = [each for holder in holders for each in getattr(holder, field) or ()]
    for holder in holders:
        setattr(holder, last, [each for each in getattr(holder, last) or () if is_kept(each)])


# Errors


def refused(request: Message, error_code: int, message: str | None = None, *, at: str = "", to: str = "") -> Message:
    """The answer with this error: for the request as a whole or, if answers have no such field, for each part."""
    key, version = request.API_KEY, request.version
    fields = response_fields(key)
    error = fields.get("error_code")
    if error is not None and error.for_version_q(version):
        told = {_MESSAGE: message} if _MESSAGE in fields else {}
        return build_response(key, version, error_code=error_code, **told)
    return answered(request, to, [result_of(key, to, part, error_code, message) for part in parts_of(request, at)])


def answered(request: Message, to: str, results: Sequence[Mapping[str, object]]) -> Message:
    """The answer with these results alone."""
    return build_response(request.API_KEY, request.version, **{to: results})


def result_of(api_key: int, to: str, part: Part, error_code: int, message: str | None = None) -> dict[str, Any]:
    """The fields of a result, in the field `to` of an answer, that reports a part's error."""
    return _result(response_fields(api_key)[to].fields, part, dict.fromkeys(_ERROR_CODES, error_code), message)


def _result(schema: Mapping[str, Any], part: Part, error: Mapping[str, int], message: str | None) -> dict[str, object]:
    told: dict[str, object] = {code: error[code] for code in schema if code in error}
    if _MESSAGE in schema:
        told[_MESSAGE] = message
    told |= dict.fromkeys(schema.keys() & _NO_OFFSETS, -1)
    if isinstance(part, (str, int)):
        # Its name is the first field beside those.
        return {next(name for name in schema if name not in told): part, **told}
    for name, field in schema.items():
        if name in NAMES and hasattr(part, name):
            told[name] = getattr(part, name)
        elif name == "user":
            told[name] = part.name
        elif name == "entity":
            told[name] = [{of: getattr(each, of) for of in field.fields} for each in part.entity]
        elif field.is_struct_array() and _array_of(part) and not _ERROR_CODES.isdisjoint(field.fields):
            told[name] = [_result(field.fields, each, error, message) for each in partitions_of(part)]
    return told


def _array_of(part: Part) -> str | None:
    """The name of the first array among a part's fields."""
    return next(
        (name for name, field in part._struct.fields.items() if field.is_struct_array() or field.is_array()), None
    )


# Merging


def merged(answers: Sequence[Message], to: str, parts: Sequence[Part] = ()) -> Message:
    """One answer with all results of the others. The first error code of an answer as a whole counts.

    The results are in the order of the request's `parts`. Without `parts`, the last result of each name is kept. Topics
    of one name become one, with all their partitions.
    """
    whole = min(answers, key=lambda answer: getattr(answer, "error_code", NONE) != NONE)
    results: dict[object, Part] = {}
    for answer in answers:
        if getattr(whole, "error_code", NONE) == NONE != getattr(answer, "error_code", NONE):
            whole.error_code = answer.error_code
        whole.throttle_time_ms = max(whole.throttle_time_ms, answer.throttle_time_ms)
        for each in getattr(answer, to) or ():
            key = _key(each)
            if has_partitions(each) and key in results:
                results[key] = only(each, [*partitions_of(results[key]), *partitions_of(each)])
            else:
                is_repeated = key in results and (parts or key == _NAMELESS)
                results[len(results) if is_repeated else key] = each
    order = {_key(part): place for place, part in reversed([*enumerate(parts)])}
    setattr(whole, to, sorted(results.values(), key=lambda each: order.get(_key(each), len(order))))
    return whole


def _key(part: Part) -> tuple[Any, int | None]:
    """The key that a part and its result have in common."""
    return name_of(part), getattr(part, "resource_type", None)


_NAMELESS: Final = (None, None)


def has_partitions(result: Part) -> bool:
    """Whether a result is a topic's, with a result for each partition."""
    array = _array_of(result)
    return array is not None and not _ERROR_CODES.isdisjoint(result._struct.fields[array].fields or ())
