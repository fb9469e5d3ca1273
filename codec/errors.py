"""What the codec raises: `CodecError` and its four kinds, and nothing else.

Bytes from the network are hostile until read. Every function of this package either returns what its docstring
promises or raises one of these; no IndexError, struct.error, UnicodeDecodeError or MemoryError leaves it.
"""


class CodecError(Exception):
    """The bytes are not the message they were said to be."""


class Truncated(CodecError):
    """The bytes end before the message does."""


class InvalidField(CodecError):
    """A field holds a value that the protocol does not allow there."""


class FrameTooLarge(CodecError):
    """A frame announces more bytes than this listener admits."""


class UnsupportedVersion(CodecError):
    """The API key or version is not one this codec reads."""
