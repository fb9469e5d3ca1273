"""Read and write messages of any length in portions.

Work on a long message is a generator: it yields after each portion, so that its caller may do other work in between,
and returns its result. A portion takes about a millisecond, whatever the message.
"""

from __future__ import annotations

from collections.abc import Generator
from struct import Struct
from typing import TypeAlias, TypeVar

from kproxy_codec.errors import InvalidField, Truncated
from kproxy_codec.primitives import Buffer, read_count, read_fixed, skip_string, skip_tagged_fields

Result = TypeVar("Result")
Work: TypeAlias = Generator[None, None, Result]
# The number of array elements in a portion; an element costs about a microsecond.
PORTION = 1_000


def at_once(work: Work[Result]) -> Result:
    """Run all portions one after another and return the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result


class Walk:
    """A cursor in the body of a message. Raises CodecError for invalid bytes."""

    __slots__ = ("_room", "at", "body", "compact", "limit")

    def __init__(self, body: Buffer, *, compact: bool) -> None:
        self.body = memoryview(body)
        self.limit = len(body)
        self.compact = compact
        self.at = 0
        self._room = PORTION

    @property
    def room(self) -> int:
        """The elements left in the portion; at least one."""
        return self._room

    def spend(self, elements: int) -> bool:
        """Count elements as done; return whether the portion is over."""
        self._room -= elements
        if self._room > 0:
            return False
        self._room = PORTION
        return True

    def skip(self, size: int) -> memoryview:
        """Skip `size` bytes and return them."""
        start, end = self.at, self.at + size
        if end > self.limit:
            raise Truncated(f"no room for {size} bytes at byte {start}: the message ends at {self.limit}")
        self.at = end
        return self.body[start:end]

    def fixed(self, form: Struct) -> int:
        value, self.at = read_fixed(form, self.body, self.at, self.limit)
        return value

    def string(self, *, nullable: bool = False) -> bytes | None:
        """The bytes of a string; None for null."""
        start, end, self.at = skip_string(self.body, self.at, self.limit, compact=self.compact, nullable=nullable)
        return bytes(self.body[start:end]) if start >= 0 else None

    def text(self, *, nullable: bool = False) -> str | None:
        start = self.at
        value = self.string(nullable=nullable)
        try:
            return None if value is None else value.decode()
        except UnicodeDecodeError as error:
            raise InvalidField(f"invalid string at byte {start}: not UTF-8") from error

    def count(self, least_bytes: int, *, nullable: bool = False) -> int:
        """The number of elements of an array; -1 for null."""
        count, self.at = read_count(
            self.body, self.at, self.limit, compact=self.compact, least_bytes=least_bytes, nullable=nullable
        )
        return count

    def tags(self) -> None:
        """Skip tagged fields, if messages have them."""
        if self.compact:
            self.at = skip_tagged_fields(self.body, self.at, self.limit)

    def end(self) -> None:
        """Skip the message's own tagged fields, and check that nothing follows."""
        self.tags()
        if self.at != self.limit:
            raise InvalidField(f"{self.limit - self.at} bytes follow the end of the message")
