"""Parse the addresses of etcd members, and diagnose a member that fails for a reason that a retry cannot fix.

Each member gets a gRPC target, and so a channel, of its own. A target of several addresses (`ipv4:a,b`) has one
authority: the certificates of the members would not verify, names could not be in it, and gRPC would choose the member
of a call. gRPC resolves a name when it first connects, and again whenever a connection is lost.

For most failures gRPC reports only that a socket was closed. So, after gRPC has failed, `diagnose` looks for the reason
with Python's own TLS, on a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl
from collections.abc import Sequence
from typing import NamedTuple

from kproxy.address import Address
from kproxy.config.etcd import EtcdOptions, tls_context
from kproxy.errors import StartupError
from kproxy.etcd.errors import EtcdMisused
from kproxy.runtime.resolver import dial

DEFAULT_PORT = 2379


class Endpoint(NamedTuple):
    """One etcd member as configured."""

    host: str
    port: int
    tls: bool = False

    def __str__(self) -> str:
        return str(Address(self.host, self.port))

    @property
    def target(self) -> str:
        """The gRPC target."""
        return f"dns:///{self}"


def parse_endpoints(texts: Sequence[str]) -> tuple[Endpoint, ...]:
    """Parse the members' addresses, without duplicates. Raises EtcdMisused, which names the fault."""
    if not texts:
        raise EtcdMisused("No etcd endpoint is configured: give at least one, such as http://127.0.0.1:2379.")
    endpoints = tuple(dict.fromkeys(parse_endpoint(text) for text in texts))
    if len({endpoint.tls for endpoint in endpoints}) > 1:
        listed = ", ".join(texts)
        raise EtcdMisused(f"The etcd endpoints {listed} mix TLS and plain text: write https:// for each, or for none.")
    return endpoints


def parse_endpoint(text: str) -> Endpoint:
    """Parse `host`, `host:port` or `[v6]:port`, each after `http://`, `https://` or nothing, which is plain."""
    rest = text.strip()
    scheme, separator, after = rest.partition("://")
    tls = False
    if separator:
        tls = scheme.lower() == "https"
        if scheme.lower() not in ("http", "https"):
            raise EtcdMisused(f"etcd endpoint {text!r} has an unknown scheme: write http://host:port or https://...")
        rest = after
    rest = rest.removesuffix("/")
    if rest.startswith("["):
        host, bracket, port_text = rest[1:].partition("]")
        if not bracket or (port_text and not port_text.startswith(":")):
            raise EtcdMisused(f"etcd endpoint {text!r} is not an address: write [address]:port.")
        port_text = port_text[1:]
    elif rest.count(":") > 1:
        host, port_text = rest, ""
    else:
        host, _, port_text = rest.partition(":")
    return Endpoint(_checked_host(host, text), _checked_port(port_text, text), tls)


def _checked_host(host: str, text: str) -> str:
    if not host or any(character.isspace() or character in "/,@?#[]" for character in host):
        raise EtcdMisused(f"etcd endpoint {text!r} has no usable host: write host:port.")
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise EtcdMisused(f"etcd endpoint {text!r} is not an address: write host:port or [address]:port.") from None
    return host


def _checked_port(port_text: str, text: str) -> int:
    if not port_text:
        return DEFAULT_PORT
    if not (port_text.isascii() and port_text.isdigit() and len(port_text) <= 5 and 0 < int(port_text) < 65536):
        raise EtcdMisused(f"etcd endpoint {text!r} has no usable port: a port is a number from 1 to 65535.")
    return int(port_text)


DIAGNOSIS_TIMEOUT_S = 2.0
# With TLS 1.3 a server refuses a client's certificate after the handshake is over for the client.
REFUSAL_WAIT_S = 0.5
# X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH, X509_V_ERR_CERT_HAS_EXPIRED
_OTHER_NAME = (62, 64)
_EXPIRED = 10
# The start of HTTP/2: the client's preface, and on either side a SETTINGS frame (RFC 9113, 3.4).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4


async def diagnose(endpoint: Endpoint, options: EtcdOptions) -> str | None:
    """Describe a member's fault in one sentence; None if nobody listens, the member hangs, or no fault is found."""
    try:
        async with asyncio.timeout(DIAGNOSIS_TIMEOUT_S):
            if endpoint.tls:
                return await _tls_wrong(endpoint, options)
            return await _plain_wrong(endpoint)
    except (OSError, TimeoutError):
        return None
    except StartupError as error:
        return str(error)


async def _plain_wrong(endpoint: Endpoint) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The certificate does not matter: nothing is sent.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        _, writer = await _connect(endpoint, context)
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return None
    else:
        await _close(writer)
    return f"etcd at {endpoint} speaks TLS: write https://{endpoint}."


async def _tls_wrong(endpoint: Endpoint, options: EtcdOptions) -> str | None:
    context = await asyncio.to_thread(tls_context, options)
    name = options.server_name or endpoint.host
    try:
        reader, writer = await _connect(endpoint, context, name)
    except ssl.SSLCertVerificationError as error:
        return _not_verified(endpoint, name, options, error)
    except (ssl.SSLError, ConnectionError) as error:
        if await _speaks_plainly(endpoint):
            return f"etcd at {endpoint} does not speak TLS: write http://{endpoint}."
        return _no_handshake(endpoint, options, error)
    try:
        async with asyncio.timeout(REFUSAL_WAIT_S):
            await reader.read(1)
    except ssl.SSLError as error:
        return _no_handshake(endpoint, options, error)
    except TimeoutError:
        return None
    finally:
        await _close(writer)
    return None


def _not_verified(endpoint: Endpoint, name: str, options: EtcdOptions, error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _OTHER_NAME:
        return (
            f"etcd at {endpoint} has a certificate for another name than {name}: "
            f"use the name it is made out to in its URL, or give that name with server_name in [etcd]."
        )
    if error.verify_code == _EXPIRED:
        return f"etcd at {endpoint} has a certificate that has expired: renew it."
    by = f"the authorities in {options.ca}" if options.ca else "an authority that this machine trusts"
    return (
        f"etcd at {endpoint} has a certificate that is not signed by {by} ({error.verify_message}): "
        f"name its authority's certificate with --etcd-ca FILE."
    )


def _no_handshake(endpoint: Endpoint, options: EtcdOptions, error: OSError) -> str | None:
    reason = (error.reason if isinstance(error, ssl.SSLError) else "") or ""
    if not reason or "EOF" in reason:
        # A server that closes the connection without an alert may be stopping.
        return None
    if "ALERT" in reason:
        if options.cert is None:
            return f"etcd at {endpoint} wants a client certificate: give one with --etcd-cert FILE and --etcd-key FILE."
        return f"etcd at {endpoint} does not take the client certificate {options.cert} ({reason.lower()})."
    return f"etcd at {endpoint} and kproxy find no way to speak TLS ({reason.lower()})."


async def _speaks_plainly(endpoint: Endpoint) -> bool:
    reader, writer = await _connect(endpoint)
    try:
        writer.write(_PREFACE)
        return (await reader.readexactly(9))[3] == _SETTINGS
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    finally:
        await _close(writer)


async def _connect(
    endpoint: Endpoint, context: ssl.SSLContext | None = None, name: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, with TLS if there is a `context`, to a server whose certificate names `name`."""
    server_name = (name or endpoint.host) if context is not None else None
    return await dial(
        lambda host, port: asyncio.open_connection(host, port, ssl=context, server_hostname=server_name),
        endpoint.host,
        endpoint.port,
    )


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, ssl.SSLError):
        await writer.wait_closed()
