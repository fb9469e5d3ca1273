"""Define the exceptions of the codec: `CodecError` and its six kinds.

Bytes from the network are hostile until parsed. Every function that reads them returns the result that its docstring
names or raises a CodecError, never an IndexError, struct.error, UnicodeDecodeError or MemoryError.
"""


class CodecError(Exception):
    """The bytes are not the expected message."""


class Truncated(CodecError):
    """The bytes end before the message does."""


class InvalidField(CodecError):
    """A field holds a value that the protocol does not allow there."""


class FrameTooLarge(CodecError):
    """A frame announces more bytes than its reader admits; `first_bytes` are the bytes read as its length."""

    def __init__(self, reason: str, first_bytes: bytes = b"") -> None:
        super().__init__(reason)
        self.first_bytes = first_bytes


class UnsupportedVersion(CodecError):
    """The codec does not support the API key or version."""


class UnexpectedAnswer(CodecError):
    """An answer does not belong to the request whose answer comes next."""


class ForeignProtocol(CodecError):
    """The other side does not speak Kafka, or has other security settings.

    The message says how to fix this. `protocol` is the other side's protocol. `reply` makes the other side report the
    problem to its user; it is empty if no reply can.
    """

    def __init__(self, protocol: str, reason: str, reply: bytes = b"") -> None:
        super().__init__(reason)
        self.protocol = protocol
        self.reply = reply
