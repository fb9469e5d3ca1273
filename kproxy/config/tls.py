"""Check the options of TLS for listeners, the admin page and connections to brokers, and make TLS contexts from them.

`[tls]` and `tls` of a `[[listeners]]` apply to clients, `[broker_tls]` to brokers, `tls` of `[admin]` to the admin
page, `tls` of `[audit]` to the cluster that gets the audit trail, and `--replication-tls-...` to connections between
reference brokers. All files are PEM. A key is never part of an error.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NoReturn, Self

import msgspec

from kproxy.config.certificates import Certificate, meet, missing_half, rehearse
from kproxy.config.parsing import Texts, given_keys, read_file, unreadable
from kproxy.config.principal_rules import DEFAULT_MAPPING, PrincipalMapping, parse_kinds, parse_rules
from kproxy.errors import StartupError

# Larger than any chain of certificates. A revocation list may be long. A file that was named by mistake, such as a log
# or a device, must not be read whole.
MAX_FILE_BYTES = 1 << 20
MAX_CRL_BYTES = 64 << 20

ClientAuth = Literal["none", "optional", "required"]
CrlCheck = Literal["chain", "leaf"]
MinVersion = Literal["1.2", "1.3"]
# The prefix of the options of TLS between brokers.
REPLICATION_FLAGS = "--replication-tls-"
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class PageTls(msgspec.Struct, frozen=True):
    """The section `tls` of `[admin]`.

    Clients must show a certificate if `client_ca` is set, unless `client_auth` is `optional`. `client_crl_check` is by
    default `chain`, which needs the lists of all authorities from the client's to the root. `leaf` needs only the list
    of the authority that signed the client's certificate, and does not notice a revoked authority. Errors name the
    options with `prefix`.
    """

    prefix: ClassVar[str] = "admin.tls."

    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    client_auth: ClientAuth | None = None
    client_crl: Path | None = None
    client_crl_check: CrlCheck | None = None
    min_version: MinVersion = "1.2"

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for file in (self.cert, self.key, self.client_ca, self.client_crl) if file is not None)

    def checked(self, sources: Mapping[str, str]) -> Self | None:
        """Return itself, or None if no option is given; `sources` has the source of each key.

        Raises StartupError if the options do not fit together or a file cannot be used.
        """
        given = given_keys(self)
        if not given:
            return None
        if self.cert is None:
            raise StartupError(
                f"{sources[given[0]]}: TLS needs the listener's certificate: name its file with {self.prefix}cert, and "
                f"the file of its private key with {self.prefix}key."
            )
        if self.key is None:
            raise StartupError(
                f"{sources['cert']}: the certificate has no effect without its private key: set {self.prefix}key."
            )
        if self.client_auth in ("optional", "required") and self.client_ca is None:
            raise StartupError(
                f"{sources['client_auth']}: clients' certificates need the authorities that sign them: set "
                f"{self.prefix}client_ca."
            )
        for key in ("client_ca", "client_crl", "client_crl_check", "principal_from", "principal_mapping_rules"):
            if key in given and (self.client_ca is None or self.client_auth == "none"):
                raise StartupError(
                    f"{sources[key]} applies only to clients' certificates, but {self.prefix}client_auth is none."
                )
        if self.client_crl is None and self.client_crl_check is not None:
            raise StartupError(f"{sources['client_crl_check']} needs a revocation list: set {self.prefix}client_crl.")
        load_listener_tls(self)
        return self


class ListenerTls(PageTls, frozen=True):
    """The section `[tls]`, or `tls` of one of `[[listeners]]`.

    `principal_...` map the names in a client's certificate to its principal's. With `strict_server_name` clients that
    ask for a name that the certificate does not have are refused.
    """

    prefix: ClassVar[str] = "tls."

    principal_from: Texts | None = None
    principal_mapping_rules: str | list[str] | None = None
    strict_server_name: bool = False

    @property
    def principals(self) -> PrincipalMapping:
        """Return the mapping of names. Raises ValueError for an invalid rule or kind."""
        rules, kinds = self.principal_mapping_rules, self.principal_from
        return PrincipalMapping(
            DEFAULT_MAPPING.rules if rules is None else parse_rules(rules),
            DEFAULT_MAPPING.kinds if kinds is None else parse_kinds(kinds),
        )

    def checked(self, sources: Mapping[str, str]) -> Self | None:
        checked = super().checked(sources)
        for key, option, parse in (
            ("principal_from", self.principal_from, parse_kinds),
            ("principal_mapping_rules", self.principal_mapping_rules, parse_rules),
        ):
            try:
                if option is not None:
                    parse(option)
            except ValueError as error:
                raise StartupError(f"{sources[key]}: {error}.") from error
        return checked


class BrokerTls(msgspec.Struct, frozen=True, kw_only=True):
    """The section `[broker_tls]`.

    `ca` None stands for the authorities that this machine trusts. `server_name` is the name in every broker's
    certificate, if that is not the host that the broker advertises. `crl_check` is as in PageTls. Errors name the
    options with `prefix`.
    """

    prefix: ClassVar[str] = "broker_tls."

    enabled: bool | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    crl: Path | None = None
    crl_check: CrlCheck | None = None
    server_name: str | None = None
    min_version: MinVersion = "1.2"

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for file in (self.ca, self.cert, self.key, self.crl) if file is not None)

    def checked(self, sources: Mapping[str, str]) -> Self | None:
        """Return itself, or None if brokers are accessed in plain text. Raises StartupError as PageTls."""
        is_on = bool(given_keys(self)) if self.enabled is None else self.enabled
        if not is_on:
            return None
        if (self.cert is None) is not (self.key is None):
            alone, other = ("cert", "key") if self.key is None else ("key", "cert")
            raise StartupError(f"{sources[alone]} requires its other half: set {self.prefix}{other} as well.")
        if self.crl is None and self.crl_check is not None:
            raise StartupError(f"{sources['crl_check']} needs a revocation list: set {self.prefix}crl.")
        load_broker_tls(self)
        return self


class AuditTls(BrokerTls, frozen=True):
    """The section `tls` of `[audit]`."""

    prefix: ClassVar[str] = "audit.tls."


class ReplicationTlsSection(msgspec.Struct, frozen=True, kw_only=True):
    """The flags `--replication-tls-...` as given."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None


@dataclass(frozen=True)
class ReplicationTls:
    """TLS between reference brokers, checked. Each shows `cert`, and accepts certificates that `ca` has signed."""

    cert: Path
    key: Path
    ca: Path

    @property
    def files(self) -> tuple[Path, ...]:
        return self.cert, self.key, self.ca


@dataclass(frozen=True)
class Loaded:
    """A context, and the certificate that it shows, or None."""

    context: ssl.SSLContext
    certificate: Certificate | None


@dataclass(frozen=True)
class LoadedReplication:
    """The contexts of a broker for followers and for leaders, which show the same certificate."""

    listener: Loaded
    dial: ssl.SSLContext


def replication_tls(given: ReplicationTlsSection, sources: Mapping[str, str]) -> ReplicationTls | None:
    """Check the options; None if none is given. The files are read by `load_replication_tls`. Raises StartupError."""
    values = given_keys(given)
    if not values:
        return None
    missing = [f"{REPLICATION_FLAGS}{key}" for key in ("cert", "key", "ca") if key not in values]
    if given.cert is None or given.key is None or given.ca is None:
        raise StartupError(
            f"{sources[values[0]]}: TLS between brokers needs a certificate, its key and the authorities that "
            f"sign brokers' certificates: give {' and '.join(missing)} as well."
        )
    return ReplicationTls(given.cert, given.key, given.ca)


def load_listener_tls(options: PageTls, kind: type[ssl.SSLContext] = ssl.SSLContext) -> Loaded:
    """Load the files into a context of class `kind`. Raises StartupError naming an unusable file."""
    if options.cert is None or options.key is None:
        raise StartupError(f"TLS needs {options.prefix}cert and {options.prefix}key: set both.")
    context = kind(ssl.PROTOCOL_TLS_SERVER)
    _set_common(context, options.min_version)
    load_pair(context, options.cert, options.key, options.prefix)
    if options.client_ca is not None:
        load_authorities(context, options.client_ca, f"{options.prefix}client_ca")
        context.verify_mode = ssl.CERT_OPTIONAL if options.client_auth == "optional" else ssl.CERT_REQUIRED
        _give_no_tickets(context)
    _load_crl(context, options.client_crl, options.client_crl_check, f"{options.prefix}client_crl")
    return Loaded(context, _rehearsed(options.cert, options.key, f"{options.prefix}cert", server_side=True))


def load_broker_tls(options: BrokerTls) -> Loaded:
    """Load the files. Raises StartupError naming an unusable file."""
    context = ssl.create_default_context() if options.ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _set_common(context, options.min_version)
    if options.ca is not None:
        load_authorities(context, options.ca, f"{options.prefix}ca")
    _load_crl(context, options.crl, options.crl_check, f"{options.prefix}crl")
    if options.cert is None or options.key is None:
        return Loaded(context, None)
    load_pair(context, options.cert, options.key, options.prefix)
    return Loaded(context, _rehearsed(options.cert, options.key, f"{options.prefix}cert", server_side=False))


def load_replication_tls(options: ReplicationTls, kind: type[ssl.SSLContext] = ssl.SSLContext) -> LoadedReplication:
    """Load the files into contexts, the listener's of class `kind`, and test a handshake between them.

    Raises StartupError naming an unusable file, also if brokers with the same authorities would refuse the certificate.
    """
    listener, dial = kind(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The authorities sign for brokers only. The later authentication names the broker.
    dial.check_hostname = False
    for context in (listener, dial):
        _set_common(context, "1.2")
        load_pair(context, options.cert, options.key, REPLICATION_FLAGS)
        load_authorities(context, options.ca, f"{REPLICATION_FLAGS}ca")
        context.verify_mode = ssl.CERT_REQUIRED
    _give_no_tickets(listener)
    named = f"{REPLICATION_FLAGS}cert"
    _rehearsed(options.cert, options.key, named, server_side=False)
    certificate = _rehearsed(options.cert, options.key, named, server_side=True)
    try:
        meet(listener, dial)
    except ssl.SSLCertVerificationError as error:
        raise StartupError(
            f"{named} {options.cert}: other brokers would refuse it ({error.verify_message.rstrip('.')}): it has to be "
            f"signed by an authority in {REPLICATION_FLAGS}ca {options.ca}."
        ) from error
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(f"{named} {options.cert} cannot be used for a handshake: {error}.") from error
    return LoadedReplication(Loaded(listener, certificate), dial)


def _set_common(context: ssl.SSLContext, min_version: MinVersion) -> None:
    context.minimum_version = _VERSIONS[min_version]
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION


def _give_no_tickets(context: ssl.SSLContext) -> None:
    """Keep clients from resuming sessions, because OpenSSL then does not check their certificates again.

    With TLS 1.2 a client can still resume a session that this context remembers, for two hours at most; the acceptor
    checks the certificate of such a session.
    """
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET


def load_pair(context: ssl.SSLContext, cert: Path, key: Path, prefix: str) -> None:
    """Load a certificate and its key, which errors call `prefix`cert and `prefix`key. Raises StartupError."""
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
    raise StartupError(f"{prefix}key is encrypted: store it without a passphrase.")


def load_authorities(context: ssl.SSLContext, file: Path, named: str) -> None:
    """Trust the certificates of a file, which errors call `named`. Raises StartupError."""
    read_file(file, named, MAX_FILE_BYTES, "that is another file")
    try:
        context.load_verify_locations(file)
    except (ssl.SSLError, OSError) as error:
        raise StartupError(f"{named} {file} holds no certificates: give a file in PEM.") from error


def _load_crl(context: ssl.SSLContext, file: Path | None, check: CrlCheck | None, named: str) -> None:
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
        # OpenSSL trusts every certificate in the file as an authority, and lists are often fetched by HTTP.
        raise StartupError(f"{named} {file} holds a certificate, which would be trusted: give a file with lists only.")
    # OpenSSL checks the root as well. If the root signed the leaf itself, its list serves for both.
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF if check == "leaf" else ssl.VERIFY_CRL_CHECK_CHAIN


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
