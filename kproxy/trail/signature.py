"""Chain the rows of a trail, and sign them.

A row names the row before it by its digest (`previous`): the first DIGEST_BYTES of the SHA-256 of that whole line, in
hexadecimal. So an audit sees that a row was altered later, unless all rows after it were rewritten.

With a key, an audit can tell rows of proxies from rows that somebody else wrote to the same place.

A signed row ends in its `mac`: the first MAC_BYTES of the HMAC-SHA256 of the row without it, in hexadecimal. The row
names its proxy, incarnation and sequence number, so that it counts once and nowhere else, and a removed one leaves a
gap. Proxies and audits share the key: whoever has it can write any trail.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

DIGEST_BYTES: Final = 16
MAC_BYTES: Final = 16
_BEGIN: Final = b',"mac":"'
_END: Final = b'"}'
_LENGTH: Final = len(_BEGIN) + 2 * MAC_BYTES + len(_END)


def digest(row: bytes) -> str:
    """Return what the next row of the trail has as `previous`."""
    return hashlib.sha256(row).hexdigest()[: 2 * DIGEST_BYTES]


def chained(row: bytes, previous: str) -> bytes:
    """Return a row, a line of JSON, with the digest of the row before it; "" for none."""
    return b'%b,"previous":"%b"}' % (row[:-1], previous.encode())


def signed(row: bytes, key: bytes) -> bytes:
    """Return a row, a line of JSON, with its mac."""
    return row[:-1] + _BEGIN + _mac(row, key) + _END


class Signatures:
    """Recognizes rows that are signed with one of `keys`, and counts the others in `refused`."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = tuple(keys)
        self.refused = 0

    def accept(self, row: bytes) -> bool:
        """Return whether a line is a signed row."""
        begin = len(row) - _LENGTH
        if row.startswith(_BEGIN, max(begin, 0)) and row.endswith(_END):
            unsigned, mac = row[:begin] + b"}", row[begin + len(_BEGIN) : -2]
            if any(hmac.compare_digest(mac, _mac(unsigned, key)) for key in self._keys):
                return True
        self.refused += 1
        return False


def _mac(row: bytes, key: bytes) -> bytes:
    return hmac.digest(key, row, "sha256")[:MAC_BYTES].hex().encode()
