"""TLS of listeners, of the admin page and of connections to brokers: options, and the contexts made of them.

`[tls]` and `tls` of a `[[listeners]]` are about clients, `[broker_tls]` about brokers, `tls` of `[admin]` about the
admin page, `tls` of `[audit]` about the cluster that the audit trail is shipped to, `--replication-tls-...` about
reference brokers among each other. All files are PEM. A key is never part of an error.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kproxy.config.certificates import Certificate, meet, missing_half, rehearse
from kproxy.config.parsing import read_file, unreadable
from kproxy.config.principal_rules import DEFAULT_MAPPING, PrincipalMapping, parse_kinds, parse_rules
from kproxy.errors import StartupError

# Larger than any chain of certificates; a revocation list may be long.
MAX_FILE_BYTES = 1 << 20
MAX_CRL_BYTES = 64 << 20

ClientAuth = Literal["none", "optional", "required"]
CrlCheck = Literal["chain", "leaf"]
MinVersion = Literal["1.2", "1.3"]
ReplicationTlsMode = Literal["optional", "required"]
# What comes before the names of the options of TLS between brokers.
REPLICATION_FLAGS = "--replication-tls-"
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class PageTlsSection(msgspec.Struct, kw_only=True):
    """`tls` of `[admin]` as given."""

    cert: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    client_ca: str | UnsetType = UNSET
    client_auth: ClientAuth | UnsetType = UNSET
    client_crl: str | UnsetType = UNSET
    client_crl_check: CrlCheck | UnsetType = UNSET
    min_version: MinVersion = "1.2"


class TlsSection(PageTlsSection, kw_only=True):
    """`[tls]` as given, or `tls` of one of `[[listeners]]`."""

    principal_from: str | list[str] | UnsetType = UNSET
    principal_mapping_rules: str | list[str] | UnsetType = UNSET
    strict_server_name: bool = False


class BrokerTlsSection(msgspec.Struct, kw_only=True):
    """`[broker_tls]` as given, or `tls` of `[audit]`."""

    enabled: bool | UnsetType = UNSET
    ca: str | UnsetType = UNSET
    cert: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    crl: str | UnsetType = UNSET
    crl_check: CrlCheck | UnsetType = UNSET
    server_name: str | UnsetType = UNSET
    min_version: MinVersion = "1.2"


class ReplicationTlsSection(msgspec.Struct, kw_only=True):
    """The flags `--replication-tls-...` as given."""

    cert: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    ca: str | UnsetType = UNSET
    mode: ReplicationTlsMode | UnsetType = UNSET


@dataclass(frozen=True)
class ListenerTls:
    """TLS of one listener, or of the admin page, checked.

    `client_ca` is set unless `client_auth` is `none`. `principals` turns the names in a client's certificate into
    that of its principal. `strict_server_name`: refuse clients that ask for a name that the certificate does not have.
    `client_crl_check`: `chain` needs the lists of all authorities from the client's to the root; `leaf` needs the one
    of the authority that signed the client's certificate, and does not notice that an authority is revoked.
    Errors name the options with `prefix`.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None
    client_auth: ClientAuth = "none"
    client_crl: Path | None = None
    client_crl_check: CrlCheck = "chain"
    min_version: MinVersion = "1.2"
    strict_server_name: bool = False
    principals: PrincipalMapping = DEFAULT_MAPPING
    prefix: str = "tls."

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for file in (self.cert, self.key, self.client_ca, self.client_crl) if file is not None)


@dataclass(frozen=True)
class BrokerTls:
    """`[broker_tls]` or `tls` of `[audit]`, checked.

    `ca` None: the authorities that this machine trusts. `server_name`: the name in every broker's certificate, if that
    is not the host that the broker advertises. `crl_check` is as in ListenerTls.
    Errors name the options with `prefix`.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    crl: Path | None = None
    crl_check: CrlCheck = "chain"
    server_name: str = ""
    min_version: MinVersion = "1.2"
    prefix: str = "broker_tls."

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for file in (self.ca, self.cert, self.key, self.crl) if file is not None)


@dataclass(frozen=True)
class ReplicationTls:
    """TLS between reference brokers, checked: each shows `cert`, and accepts what an authority of `ca` has signed.

    `mode`: whether a broker replicates without TLS with brokers that have none (kproxy.broker.replication.encryption).
    """

    cert: Path
    key: Path
    ca: Path
    mode: ReplicationTlsMode = "required"

    @property
    def files(self) -> tuple[Path, ...]:
        return self.cert, self.key, self.ca


Options = TypeVar("Options", ListenerTls, BrokerTls)


@dataclass(frozen=True)
class Loaded:
    """A context, and the certificate that it shows; None if it shows none."""

    context: ssl.SSLContext
    certificate: Certificate | None


@dataclass(frozen=True)
class LoadedReplication:
    """The contexts of a broker towards followers and towards leaders, which show the same certificate."""

    listener: Loaded
    dial: ssl.SSLContext


def listener_tls(given: PageTlsSection, sources: Mapping[str, str], prefix: str = "tls.") -> ListenerTls | None:
    """Check the options; None if none is given. `sources` has the source of each key; errors name keys with `prefix`.

    Raises StartupError if they do not fit together or a file cannot be used.
    """
    values = _given(given, sources)
    rest = given if isinstance(given, TlsSection) else TlsSection()
    if given.cert is UNSET:
        first = next(iter(values), None)
        if first is None and given.min_version == "1.2" and not rest.strict_server_name:
            return None
        raise StartupError(
            f"{sources[first or 'cert']}: TLS needs the listener's certificate: name its file with {prefix}cert, and "
            f"the file of its private key with {prefix}key."
        )
    if given.key is UNSET:
        raise StartupError(f"{sources['cert']}: the certificate is of no use without its private key: set {prefix}key.")
    client_auth: ClientAuth = given.client_auth or ("none" if given.client_ca is UNSET else "required")
    if client_auth != "none" and given.client_ca is UNSET:
        raise StartupError(
            f"{sources['client_auth']}: clients' certificates need the authorities that sign them: set "
            f"{prefix}client_ca."
        )
    for key in ("client_ca", "client_crl", "client_crl_check", "principal_from", "principal_mapping_rules"):
        if client_auth == "none" and key in values:
            raise StartupError(f"{sources[key]}: it is about clients' certificates, and {prefix}client_auth is none.")
    if given.client_crl is UNSET and given.client_crl_check is not UNSET:
        raise StartupError(f"{sources['client_crl_check']}: there is no list to check with: set {prefix}client_crl.")
    options = ListenerTls(
        cert=Path(given.cert),
        key=Path(given.key),
        client_ca=_path(given.client_ca),
        client_auth=client_auth,
        client_crl=_path(given.client_crl),
        client_crl_check=given.client_crl_check or "chain",
        min_version=given.min_version,
        strict_server_name=rest.strict_server_name,
        principals=_principals(rest, sources),
        prefix=prefix,
    )
    load_listener_tls(options)
    return options


def _principals(given: TlsSection, sources: Mapping[str, str]) -> PrincipalMapping:
    mapping = DEFAULT_MAPPING
    if given.principal_from is not UNSET:
        mapping = mapping._replace(kinds=parse_kinds(given.principal_from, sources["principal_from"]))
    if given.principal_mapping_rules is not UNSET:
        try:
            mapping = mapping._replace(rules=parse_rules(given.principal_mapping_rules))
        except ValueError as error:
            raise StartupError(f"{sources['principal_mapping_rules']}: {error}.") from error
    return mapping


def broker_tls(given: BrokerTlsSection, sources: Mapping[str, str], prefix: str = "broker_tls.") -> BrokerTls | None:
    """Check the options; None if brokers are accessed in plain text. Raises StartupError as `listener_tls`."""
    values = _given(given, sources)
    if not (bool(values) if given.enabled is UNSET else given.enabled):
        return None
    if (given.cert is UNSET) is not (given.key is UNSET):
        alone, other = ("cert", "key") if given.key is UNSET else ("key", "cert")
        raise StartupError(f"{sources[alone]}: it is of no use without its other half: set {prefix}{other} as well.")
    if given.crl is UNSET and given.crl_check is not UNSET:
        raise StartupError(f"{sources['crl_check']}: there is no list to check with: set {prefix}crl.")
    options = BrokerTls(
        ca=_path(given.ca),
        cert=_path(given.cert),
        key=_path(given.key),
        crl=_path(given.crl),
        crl_check=given.crl_check or "chain",
        server_name=given.server_name or "",
        min_version=given.min_version,
        prefix=prefix,
    )
    load_broker_tls(options)
    return options


def replication_tls(given: ReplicationTlsSection, sources: Mapping[str, str]) -> ReplicationTls | None:
    """Check the options; None if none is given. The files are read by `load_replication_tls`. Raises StartupError."""
    values = _given(given, sources)
    if not values:
        return None
    missing = [f"{REPLICATION_FLAGS}{key}" for key in ("cert", "key", "ca") if key not in values]
    if given.cert is UNSET or given.key is UNSET or given.ca is UNSET:
        raise StartupError(
            f"{sources[next(iter(values))]}: TLS between brokers needs a certificate, its key and the authorities that "
            f"sign brokers' certificates: give {' and '.join(missing)} as well."
        )
    return ReplicationTls(Path(given.cert), Path(given.key), Path(given.ca), given.mode or "required")


def _given(
    given: PageTlsSection | BrokerTlsSection | ReplicationTlsSection, sources: Mapping[str, str]
) -> dict[str, object]:
    values = {key: value for key, value in msgspec.structs.asdict(given).items() if value is not UNSET}
    for key, value in values.items():
        if value == "":
            raise StartupError(f"{sources[key]}: it is empty: give a value, or leave it out.")
    return {key: value for key, value in values.items() if key not in ("min_version", "strict_server_name", "enabled")}


def _path(value: str | UnsetType) -> Path | None:
    return None if value is UNSET else Path(value)


def load_listener_tls(options: ListenerTls, kind: type[ssl.SSLContext] = ssl.SSLContext) -> Loaded:
    """Read the files into a context of that kind. Raises StartupError that names one that cannot be used."""
    context = kind(ssl.PROTOCOL_TLS_SERVER)
    _set_common(context, options.min_version)
    _load_pair(context, options.cert, options.key, options.prefix)
    if options.client_ca is not None:
        _load_authorities(context, options.client_ca, f"{options.prefix}client_ca")
        context.verify_mode = ssl.CERT_REQUIRED if options.client_auth == "required" else ssl.CERT_OPTIONAL
        _give_no_tickets(context)
    _load_crl(context, options.client_crl, options.client_crl_check, f"{options.prefix}client_crl")
    return Loaded(context, _rehearsed(options.cert, options.key, f"{options.prefix}cert", server_side=True))


def load_broker_tls(options: BrokerTls) -> Loaded:
    """Read the files. Raises StartupError that names one that cannot be used."""
    context = ssl.create_default_context() if options.ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _set_common(context, options.min_version)
    if options.ca is not None:
        _load_authorities(context, options.ca, f"{options.prefix}ca")
    _load_crl(context, options.crl, options.crl_check, f"{options.prefix}crl")
    if options.cert is None or options.key is None:
        return Loaded(context, None)
    _load_pair(context, options.cert, options.key, options.prefix)
    return Loaded(context, _rehearsed(options.cert, options.key, f"{options.prefix}cert", server_side=False))


def load_replication_tls(
    options: ReplicationTls, host: str, kind: type[ssl.SSLContext] = ssl.SSLContext
) -> LoadedReplication:
    """Read the files into contexts, the listener's of that kind, and have them meet each other.

    `host` is the name that the broker advertises. Raises StartupError that names a file that cannot be used, also where
    brokers with the same authorities would refuse the certificate, or look for another name in it.
    """
    listener, dial = kind(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (listener, dial):
        _set_common(context, "1.2")
        _load_pair(context, options.cert, options.key, REPLICATION_FLAGS)
        _load_authorities(context, options.ca, f"{REPLICATION_FLAGS}ca")
        context.verify_mode = ssl.CERT_REQUIRED
    _give_no_tickets(listener)
    named = f"{REPLICATION_FLAGS}cert"
    _rehearsed(options.cert, options.key, named, server_side=False)
    certificate = _rehearsed(options.cert, options.key, named, server_side=True)
    try:
        meet(listener, dial, name=host)
    except ssl.SSLCertVerificationError as error:
        raise StartupError(
            f"{named} {options.cert}: other brokers would refuse it ({error.verify_message.rstrip('.')}): it has to be "
            f"for the advertised host {host}, and signed by an authority in {REPLICATION_FLAGS}ca {options.ca}."
        ) from error
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(f"{named} {options.cert} cannot be used for a handshake: {error}.") from error
    return LoadedReplication(Loaded(listener, certificate), dial)


def _set_common(context: ssl.SSLContext, min_version: MinVersion) -> None:
    context.minimum_version = _VERSIONS[min_version]
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION


def _give_no_tickets(context: ssl.SSLContext) -> None:
    """Keep clients from resuming sessions: OpenSSL does not look at the certificate again, however old a ticket is.

    With TLS 1.2 a client can still resume a session that this context remembers, for two hours at most; the entrance
    looks at the certificate of such a session.
    """
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path, prefix: str) -> None:
    of_cert, of_key = (
        read_file(file, f"{prefix}{kind}", MAX_FILE_BYTES, "that is another file")
        for file, kind in ((cert, "cert"), (key, "key"))
    )
    wrong = missing_half(of_cert, of_key, f"{prefix}cert {cert}", f"{prefix}key {key}")
    if wrong is not None:
        raise StartupError(wrong)
    try:
        context.load_cert_chain(cert, key, password=lambda: _no_passphrase(prefix))
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            text = f"{prefix}cert {cert} and {prefix}key {key} do not belong together: give the two of one pair."
        else:
            text = f"{prefix}cert {cert} with {prefix}key {key} cannot be used: both have to be PEM."
        raise StartupError(text) from error
    except OSError as error:
        raise unreadable(f"{prefix}cert", cert, error) from error


def _no_passphrase(prefix: str) -> NoReturn:
    raise StartupError(f"{prefix}key is encrypted, and nobody can be asked for its passphrase: store it without.")


def _load_authorities(context: ssl.SSLContext, file: Path, named: str) -> None:
    read_file(file, named, MAX_FILE_BYTES, "that is another file")
    try:
        context.load_verify_locations(file)
    except (ssl.SSLError, OSError) as error:
        raise StartupError(f"{named} {file} holds no certificates: give a file in PEM.") from error


def _load_crl(context: ssl.SSLContext, file: Path | None, check: CrlCheck, named: str) -> None:
    if file is None:
        return
    if b"-----BEGIN X509 CRL-----" not in read_file(file, named, MAX_CRL_BYTES, "that is another file"):
        raise StartupError(f"{named} {file} holds no revocation list: give a file in PEM.")
    trusted = context.cert_store_stats()["x509"]
    try:
        context.load_verify_locations(file)
    except (ssl.SSLError, OSError) as error:
        raise StartupError(f"{named} {file} holds no revocation list: give a file in PEM.") from error
    if context.cert_store_stats()["x509"] != trusted:
        # OpenSSL trusts every certificate in it as an authority; lists are often fetched by HTTP.
        raise StartupError(f"{named} {file} holds a certificate, which would be trusted: give a file of lists alone.")
    # OpenSSL checks the root as well; where it signed the leaf itself, its one list serves both.
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN if check == "chain" else ssl.VERIFY_CRL_CHECK_LEAF


def _rehearsed(cert: Path, key: Path, named: str, *, server_side: bool) -> Certificate:
    try:
        return rehearse(cert, key, server_side=server_side)
    except ssl.SSLCertVerificationError as error:
        raise StartupError(
            f"{named} {cert} cannot be used: {error.verify_message}: give one that is valid now, and meant for a "
            f"{'server' if server_side else 'client'}."
        ) from error
    except (ssl.SSLError, OSError, ValueError) as error:
        raise StartupError(f"{named} {cert} cannot be used for a handshake: {error}.") from error
