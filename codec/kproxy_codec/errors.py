"""What the codec raises: `CodecError` and its five kinds, and nothing else.

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
    """A frame announces more bytes than this listener admits; `first_bytes` are those that were read as its length."""

    def __init__(self, reason: str, first_bytes: bytes = b"") -> None:
        super().__init__(reason)
        self.first_bytes = first_bytes


class UnsupportedVersion(CodecError):
    """The API key or version is not one this codec reads."""


class ForeignProtocol(CodecError):
    """This is no Kafka client, or one that is set up for another listener; the message says how to set it up.

    `protocol` is what it speaks, and `reply` is what makes it say so to its user; empty where nothing does.
    """

    def __init__(self, protocol: str, reason: str, reply: bytes = b"") -> None:
        super().__init__(reason)
        self.protocol = protocol
        self.reply = reply
