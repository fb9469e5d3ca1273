"""Parse the values of keys, addresses, topics, writer groups and times; read TOML files.

A section of the configuration is a struct whose fields are its keys. The type of a field is that of the key's values: a
Path is the name of a file, a Secret is never shown, and Texts are a list or one text with commas. A key that is not
given has the field's default.

Every error is a StartupError with the flag or key of the value, its `source`, as the subject.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any, Final, NoReturn, TypeVar, Union, cast, get_args

import msgspec

from kproxy.address import Address as Address
from kproxy.errors import StartupError
from kproxy_codec.own import MAX_NAME_BYTES

DEFAULT_LISTEN = "127.0.0.1:9092"
DEFAULT_ADMIN = "127.0.0.1:9644"
WILDCARDS = ("0.0.0.0", "::", "*")  # noqa: S104 - compared with, not bound


def parse_address(text: str, source: str) -> Address:
    """Parse `host:port` or `[IPv6]:port`. Raises StartupError."""
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        bracketed = True
    else:
        bracketed = False
    if not colon:
        raise StartupError(f"{source}: {text!r} has no port: write HOST:PORT, for example {DEFAULT_LISTEN}.")
    if ":" in host and not bracketed:
        raise StartupError(f"{source}: {text!r} is not an address: an IPv6 host goes in brackets, as in [::1]:9092.")
    if not host or any(character.isspace() or character in "/,@[]" for character in host):
        raise StartupError(f"{source}: {text!r} has no usable host: write HOST:PORT, for example {DEFAULT_LISTEN}.")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65_535):
        raise StartupError(f"{source}: {text!r} has no usable port: a port is a number from 0 to 65535.")
    return Address(host, int(port))


def split_list(value: str | Sequence[str], source: str) -> tuple[str, ...]:
    """Split `"a,b"` or `["a", "b"]`.

    Raises StartupError if the list or a part of it is empty.
    """
    try:
        return _parts(value)
    except ValueError as error:
        raise StartupError(f"{source}: {error}.") from error


def _parts(value: str | Sequence[str]) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in (value.split(",") if isinstance(value, str) else value))
    if not any(parts):
        raise ValueError("the value is empty: give one, or several separated by commas, or omit the option")
    if not all(parts):
        raise ValueError(f"{str(value)[:200]!r} has an empty part: write values separated by commas")
    return parts


def broker_addresses(texts: Sequence[str] | None, source: str) -> tuple[Address, ...]:
    """Return the addresses of brokers; none if none is given. Raises StartupError."""
    addresses = tuple(parse_address(each, source) for each in texts or ())
    for address in addresses:
        if address.port == 0:
            raise StartupError(f"{source}: no broker listens on {address}: give the broker's own port.")
    return addresses


def advertised(listen: Address, advertise: Address | None) -> Address | None:
    """Check `advertise`, as clients cannot connect to a wildcard address.

    Raises StartupError.
    """
    if advertise is None and listen.host in WILDCARDS:
        raise StartupError(
            f"clients cannot connect to {listen.host}: with --listen {listen} "
            f"give --advertise HOST:PORT as well, an address that clients reach."
        )
    if advertise is not None and advertise.host in WILDCARDS:
        raise StartupError(f"clients cannot connect to {advertise.host}: give --advertise an address that they reach.")
    return advertise


def check_prefix(prefix: str, source: str) -> str:
    """Return the prefix of keys in etcd. Raises StartupError for an invalid one."""
    if not prefix.startswith("/") or prefix.endswith("/"):
        raise StartupError(f"{source}: {prefix!r} is not a prefix of etcd keys: write one like /kafscale.")
    return prefix


# This is Kafka's own rule.
TOPIC_NAME_RULE = "its name is made of ASCII letters and digits, '.', '_' and '-', at most 249 of them"
_TOPIC = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")


def is_topic_name(text: str) -> bool:
    return _TOPIC.fullmatch(text) is not None


def parse_writer_groups(value: str | Sequence[str], source: str) -> Mapping[str, str]:
    """Parse the group by topic from texts, each one `TOPIC=GROUP` or several with commas. Raises StartupError.

    Only owners in the group (the Own API) may write to the topic.
    """
    groups: dict[str, str] = {}
    for text in [value] if isinstance(value, str) else value:
        for pair in text.split(","):
            topic, group = _parse_pair(pair.strip(), source)
            if groups.setdefault(topic, group) != group:
                raise StartupError(
                    f"{source}: topic {topic!r} has two writer groups, {groups[topic]!r} and {group!r}: keep one."
                )
    return groups


def _parse_pair(pair: str, source: str) -> tuple[str, str]:
    topic, equals, group = (part.strip() for part in pair.partition("="))
    if not equals or not group:
        raise StartupError(
            f"{source}: {pair[:300]!r} is not a topic with its writer group: write TOPIC=GROUP, for example "
            f"orders=writers."
        )
    if not is_topic_name(topic):
        raise StartupError(f"{source}: {topic[:300]!r} cannot be a topic: {TOPIC_NAME_RULE}.")
    if len(group.encode()) > MAX_NAME_BYTES:
        raise StartupError(f"{source}: the writer group of {topic!r} has a name of more than {MAX_NAME_BYTES} bytes.")
    return topic, group


_UNIT_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"(\d{1,9})(ms|s|m|h|d)")


def duration_ms(text: str) -> int | None:
    """Parse `500ms`, `10s`, `15m`, `2h` or `1d` into milliseconds.

    Returns None for any other text.
    """
    match = _DURATION.fullmatch(text)
    return None if match is None else int(match[1]) * _UNIT_MS[match[2]]


def parse_duration_ms(text: str, flag: str) -> int:
    """Parse a duration above 0 into milliseconds. Raises StartupError."""
    duration = duration_ms(text)
    if not duration:
        raise StartupError(f"{flag} {text} is not a duration: write a number and its unit, as in 500ms, 10s, 2h or 1d.")
    return duration


def parse_time_ms(text: str, flag: str, now_ms: int) -> int:
    """Parse a time into milliseconds since the epoch: ISO 8601, by default UTC, or a duration before `now_ms`.

    Raises StartupError.
    """
    ago = duration_ms(text)
    if ago is not None:
        return now_ms - ago
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise StartupError(
            f"{flag} {text} is not a time: write it as 2026-11-21T20:00 (UTC), 2026-11-21T20:00+01:00, or 2h (2 h ago)."
        ) from error
    return round((time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp() * 1000)


MAX_FILE_BYTES = 16 * 1024 * 1024


def unreadable(named: str, file: Path, error: OSError | ValueError, make: str = "make it") -> StartupError:
    """Return the error for an unreadable file; ValueError stands for a NUL in its name. `make`: how to make it."""
    number = error.errno if isinstance(error, OSError) else None
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    way_out = "name a file that can be read"
    if number in (errno.ENOENT, errno.ENOTDIR):
        way_out = f"name a file that is there, or {make}"
    elif number == errno.EISDIR:
        way_out = "name a file in it"
    elif number in (errno.EACCES, errno.EPERM):
        way_out = f"let the user of this process (uid {os.geteuid()}) read it"
    return StartupError(f"{named} {str(file)[:300]} cannot be read ({reason}): {way_out}.")


def read_file(file: Path, named: str, limit: int, otherwise: str) -> bytes:
    """Read at most `limit` bytes.

    Errors call the file `named`; `otherwise` ends the error for a longer file. Raises StartupError.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(limit + 1)
    except (OSError, ValueError) as error:
        raise unreadable(named, file, error) from error
    if len(content) > limit:
        most = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit} bytes"
        raise StartupError(f"{named} {file} is larger than {most}: {otherwise}.")
    return content


def read_secret(file: Path, named: str, kind: str, limit: int, strip: Callable[[str], str]) -> str:
    """Return the password or token that a file has, after `strip`. Raises StartupError, which never shows it."""
    try:
        secret = strip(read_file(file, named, limit, "that is another file").decode())
    except UnicodeDecodeError:
        # The error is not chained, because its cause has the content of the file.
        raise StartupError(f"{named} {file} is not UTF-8 text: name the file that has the {kind}.") from None
    if not secret:
        raise StartupError(f"{named} {file} is empty: write the {kind} into it.")
    return secret


def read_toml(file: Path, flag: str = "--config") -> dict[str, Any]:
    content = read_file(file, flag, MAX_FILE_BYTES, "that is not a configuration")
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise StartupError(f"{flag} {file} is not UTF-8 text (byte {error.start}).") from error
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"{flag} {file} is not TOML: {str(error)[:200]}.") from error


class Secret(str):
    """A text that is never shown, not even in an error."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Secret()"


class Texts(tuple[str, ...]):
    """Texts, given as a list or as one text separated by commas."""

    __slots__ = ()


def decode(kind: type[Any], given: object) -> Any:
    """Convert a given value to Texts, a Secret or a Path, as msgspec's `dec_hook`."""
    if issubclass(kind, Texts):
        return Texts(_parts(msgspec.convert(given, str | list[str])))
    text = msgspec.convert(given, str)
    if not text:
        raise ValueError(_EMPTY)
    return kind(text)


_EMPTY: Final = "the value is empty: give one, or omit the option"


def keys_of(section: type[msgspec.Struct]) -> dict[str, tuple[Any, object]]:
    """Return each key's type, without None, and its default, which is None if there is none."""
    return {
        each.name: (_without_none(each.type), None if each.default is msgspec.NODEFAULT else each.default)
        for each in msgspec.structs.fields(section)
    }


def _without_none(kind: Any) -> Any:
    kinds = get_args(kind)
    return Union[tuple(each for each in kinds if each is not NoneType)] if NoneType in kinds else kind  # noqa: UP007


def parse_value(kind: Any, given: object, source: str, *, strict: bool) -> Any:
    """Convert the value of a key; unless `strict`, texts may stand for numbers. Raises StartupError."""
    if given == "" and list[str] not in get_args(kind):
        raise StartupError(f"{source}: {_EMPTY}.")
    if isinstance(given, str) and "\0" in given:
        # No file's name has a NUL, and PLAIN ends names with it.
        raise StartupError(f"{source}: the value contains a NUL (U+0000): give one without it.")
    try:
        return msgspec.convert(given, kind, strict=strict, dec_hook=decode)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ValueError):
            raise StartupError(f"{source}: {error.__cause__}.") from error
        # msgspec does not know the key here, as it converts the value alone.
        shown = "" if kind is Secret else f" {str(given)[:80]!r}"
        reason = str(error)
        reason = f"{reason[:1].lower()}{reason[1:]}"
        raise StartupError(f"{source}: invalid value{shown} ({reason}): give {taken(kind)}.") from error


def given_keys(section: msgspec.Struct) -> list[str]:
    """Return the keys with values other than the defaults, which the output of check-config includes."""
    return [key for key, (_, default) in keys_of(type(section)).items() if getattr(section, key) != default]


Section = TypeVar("Section", bound=msgspec.Struct)


def parse_section(
    kind: type[Section], name: str, flags: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[Section, dict[str, str]]:
    """Return the section of a command without a configuration file, and the sources of its keys.

    `flags`, such as `etcd_ca`, override the environment, such as KPROXY_ETCD__CA. Raises StartupError.
    """
    values, sources = dict[str, Any](), dict[str, str]()
    for key, (takes, _) in keys_of(kind).items():
        variable, flag = f"KPROXY_{name}__{key}".upper(), flags.get(f"{name}_{key}")
        sources[key] = variable if flag is None else f"--{name}-{key}".replace("_", "-")
        given = environ.get(variable) if flag is None else flag
        if given is not None:
            values[key] = parse_value(takes, given, sources[key], strict=False)
    # The values have the types of the fields.
    return cast(Any, kind)(**values), sources


Entry = TypeVar("Entry", bound=msgspec.Struct)


_PLACE: Final = re.compile(r"(?P<reason>.*) - at `\$\.(?P<key>\w+)(?:\[[^]]*\])*`")


def parse_entry(kind: type[Entry], given: object, named: str, takes: Mapping[str, str]) -> Entry:
    """Convert one of an array of tables, which errors call `named`; `takes` has the valid values of keys, in words.

    Raises StartupError.
    """
    known = dict.fromkeys(kind.__struct_fields__)
    for key in given if isinstance(given, dict) else ():
        if key not in known:
            unknown(str(key), f"in {named}", nearest(str(key), known), False)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        reason = str(error)[:300]
        reason = f"{reason[:1].lower()}{reason[1:]}"
        place = _PLACE.fullmatch(reason)
        if place is None or place["key"] not in takes:
            raise StartupError(f"{named} is invalid: {reason}.") from error
        key = place["key"]
        raise StartupError(f"{named}: invalid {key} ({place['reason']}): give {takes[key]}.") from error


def taken(kind: Any) -> str:
    """Describe the values of a type: text, truth, numbers with bounds, one of some words, a list of texts."""
    info = msgspec.inspect.type_info(kind)
    return " or ".join(map(_words, info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)))


def _words(info: msgspec.inspect.Type) -> str:
    if isinstance(info, msgspec.inspect.LiteralType):
        return " or ".join(map(str, info.values))
    if isinstance(info, msgspec.inspect.BoolType):
        return "true or false"
    if isinstance(info, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        bounds = {"above": info.gt, "from": info.ge, "below": info.lt, "to": info.le}
        number = "a whole number" if isinstance(info, msgspec.inspect.IntType) else "a number"
        return " ".join([number, *(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)])
    if isinstance(info, msgspec.inspect.StructType):
        return "a table"
    if isinstance(info, msgspec.inspect.CustomType) and info.cls is Texts:
        return "a text or a list of texts"
    return "a list of texts" if isinstance(info, msgspec.inspect.ListType) else "a text"


def of_section(sources: Mapping[str, str], section: str) -> Mapping[str, str]:
    """Return the sources of a section's keys."""
    prefix = f"{section}."
    return {path.removeprefix(prefix): source for path, source in sources.items() if path.startswith(prefix)}


def unknown(name: str, where: str, nearest: str, is_table: bool) -> NoReturn:
    what = f"[{name}]" if is_table else name
    raise StartupError(f"unknown key {what} {where}: did you mean {nearest}?")


def nearest(name: str, known: Mapping[str, object]) -> str:
    """Return a nearly equal key of the section, else an equal key of another section, else the most similar path."""
    section = name.rpartition(".")[0]
    within = [candidate for candidate in known if section and candidate.rpartition(".")[0] == section]
    for close in difflib.get_close_matches(name, within, n=1, cutoff=0.95):
        return close
    for candidate in known:
        if "." in name and candidate.rpartition(".")[2] == name.rpartition(".")[2]:
            return candidate
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
