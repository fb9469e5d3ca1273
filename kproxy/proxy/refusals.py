"""Answer a control request with an error code, in the form that its version has.

The code is in the answer's own error_code, or else in each key, group, partition or other part of the request.
"""

from __future__ import annotations

from kproxy.proxy.apis import api_of
from kproxy.proxy.long_answers import Portions
from kproxy_codec import api_keys as keys
from kproxy_codec.control import build_response, decode_request, encode_response, response_fields
from kproxy_codec.coordination import Found, answer_find_coordinator
from kproxy_codec.errors import UnsupportedVersion
from kproxy_codec.framing import RequestHeader, response_header
from kproxy_codec.partitioned import with_length
from kproxy_codec.parts import may_have_parts, refused
from kproxy_codec.primitives import Buffer


async def refusal(
    portions: Portions, header: RequestHeader, request_body: memoryview, error_code: int, message: str | None = None
) -> list[Buffer]:
    """Return the whole answer; `message` is told to those who look for a coordinator.

    Raises CodecError, and UnsupportedVersion where the answer has no place for the code.
    """
    key, version = header.api_key, header.api_version
    size = len(request_body)
    body: Buffer
    if key == keys.FIND_COORDINATOR:
        nobody = Found("", -1, "", -1, error_code, message)
        work = answer_find_coordinator(version, request_body, lambda _, key: nobody._replace(key=key))
        body = await portions.of(work, size)
    else:
        body = await portions.apart(size, lambda: _by_schema(key, version, request_body, error_code))
    return with_length([response_header(key, version, header.correlation_id), body])


def _by_schema(key: int, version: int, request_body: memoryview, error_code: int) -> Buffer:
    own = response_fields(key).get("error_code")
    if own is not None and own.for_version_q(version):
        return encode_response(build_response(key, version, error_code=error_code))
    at, to = api_of(key, version).parts
    request = decode_request(key, version, request_body)
    if not may_have_parts(request, at):
        raise UnsupportedVersion(f"the answer to {keys.name_of(key)} v{version} has no place for error {error_code}")
    return encode_response(refused(request, error_code, at=at, to=to))
