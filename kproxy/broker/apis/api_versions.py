"""ApiVersions, versions 0-4.

- A version that is not known is answered in version 0 with UNSUPPORTED_VERSION and the whole list (KIP-511).
- From version 3 on, a client's name and version must look like one: else INVALID_REQUEST.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kproxy.broker.context import Body, Request
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import API_VERSIONS

API_KEY = API_VERSIONS
MIN_VERSION = 0
MAX_VERSION = 4

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")


def answer(request: Request, offered: Mapping[int, tuple[int, int]]) -> Body:
    """The answer, given the API keys offered with their lowest and highest versions."""
    version = request.header.api_version
    keys: Iterable[dict[str, int]] = [
        {"api_key": api_key, "min_version": lowest, "max_version": highest}
        for api_key, (lowest, highest) in sorted(offered.items())
    ]
    if not MIN_VERSION <= version <= MAX_VERSION:
        version, error_code = 0, error_codes.UNSUPPORTED_VERSION
    else:
        message = control.decode_request(API_KEY, version, request.body)
        named = version < 3 or all(
            map(_SOFTWARE.fullmatch, (message.client_software_name, message.client_software_version))
        )
        error_code = error_codes.NONE if named else error_codes.INVALID_REQUEST
    response = control.build_response(API_KEY, version, error_code=error_code, api_keys=keys)
    return [control.encode_response(response)]
