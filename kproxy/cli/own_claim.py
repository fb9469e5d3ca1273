"""`kproxy own claim`: claim resources, and hold them until the connection ends.

States
  asking    some resources are neither granted nor refused, and are requested again; the claim ends if none is granted
  holding   some resource is granted; the proxy is asked for a sign of life every SIGN_OF_LIFE_S
  severed   the proxy has closed the connection or does not answer, so that all claims are lost
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import click

from kproxy.cli.own_sources import Claims
from kproxy.cli.own_view import printable, resource_text, who
from kproxy.config import Address
from kproxy.errors import StartupError
from kproxy.observe.table import ClaimRow
from kproxy.ownership.kafka_client import BrokerUnreachable, KafkaConnection, open_any
from kproxy_codec.api_keys import API_VERSIONS, OWN
from kproxy_codec.error_codes import (
    COORDINATOR_NOT_AVAILABLE,
    FENCED_INSTANCE_ID,
    NONE,
    REQUEST_TIMED_OUT,
    THROTTLING_QUOTA_EXCEEDED,
    UNKNOWN_TOPIC_OR_PARTITION,
    name_of,
)
from kproxy_codec.errors import CodecError
from kproxy_codec.own import (
    MAX_NAME_BYTES,
    MAX_RESOURCES,
    OWN_MAX_VERSION,
    WHOLE_GROUP,
    OwnedResource,
    OwnRequest,
    OwnResource,
    OwnResponse,
    encode_own_request,
    parse_own_response,
)

SEVERED: Final = 3
CONNECT_TIMEOUT_S = 5.0
# A proxy answers after limits.own_timeout_s at the latest, even if the claim still waits.
CLAIM_TIMEOUT_S = 120.0
SIGN_OF_LIFE_S = 5.0


class Wanted(NamedTuple):
    """The resources to claim in `group`; None: the whole group."""

    group: str
    resources: tuple[OwnResource, ...] | None


def parse_wanted(group: str, resources: Sequence[str], whole: bool) -> Wanted:
    """Parse `RESOURCE` or `RESOURCE=GENERATION` each, by default generation 1. Raises StartupError."""
    if whole == bool(resources):
        raise StartupError(
            "name the resources to claim, each as RESOURCE or RESOURCE=GENERATION, or give --all for the whole group."
        )
    claims = tuple(map(_parse_resource, resources))
    names = [claim.resource for claim in claims]
    for name in (group, *names):
        if not name or len(name.encode(errors="replace")) > MAX_NAME_BYTES:
            raise StartupError(
                f"invalid name {name[:80]!r}; expected 1 to {MAX_NAME_BYTES} bytes for a group or a resource."
            )
    for name in names:
        if names.count(name) > 1:
            raise StartupError(f"resource {name!r} is named twice: name it once.")
    if len(names) > MAX_RESOURCES:
        raise StartupError(f"{len(names)} resources; expected at most {MAX_RESOURCES}, or --all for the whole group.")
    return Wanted(group, None if whole else claims)


def _parse_resource(text: str) -> OwnResource:
    resource, equals, generation = text.rpartition("=")
    if not equals:
        return OwnResource(text, 1)
    if not (generation.isascii() and generation.isdigit() and len(generation) <= 18):
        raise StartupError(
            f"invalid generation {generation!r} in {text!r}; expected RESOURCE=GENERATION, a number from 0, for "
            f"example orders/0=2."
        )
    return OwnResource(resource, int(generation))


async def claim(proxies: Sequence[Address], wanted: Wanted, client_id: str, known: Claims | None) -> int:
    """Claim and hold resources at the first proxy that answers; return the exit status.

    `known`: the source to ask for the owners of refused or lost resources.
    """
    addresses = list(proxies)
    try:
        connection = await open_any(addresses, CONNECT_TIMEOUT_S, client_id.encode())
    except BrokerUnreachable as error:
        raise StartupError(
            f"{error}: start `kproxy dev`, or name where a proxy's clients connect with --bootstrap H:P."
        ) from error
    try:
        return await _Claimant(connection, wanted, known).run()
    finally:
        await connection.close()


class _Claimant:
    def __init__(self, connection: KafkaConnection, wanted: Wanted, known: Claims | None) -> None:
        self._connection = connection
        self._address = address = Address(*connection.address)
        self._wanted = wanted
        self._known = known
        self._granted: list[OwnedResource] = []
        offered = connection.offered(OWN)
        if offered is None or offered[0] > OWN_MAX_VERSION:
            raise StartupError(
                f"{address} does not offer the Own API: kproxy does if it has an etcd "
                f"(kproxy serve --etcd URL, or kproxy dev)."
            )
        self._version = min(offered[1], OWN_MAX_VERSION)

    async def run(self) -> int:
        try:
            return await self._run()
        except asyncio.CancelledError:
            _say(f"\nCtrl-C: {self._shown()} is free." if self._granted else "\nCtrl-C: nothing was granted.")
            raise

    async def _run(self) -> int:
        try:
            await self._ask()
            if not self._granted:
                return 1
            _say(f"Holding {self._shown()} until Ctrl-C.")
            while not await self._connection.has_ended_within(SIGN_OF_LIFE_S):
                await self._connection.ask(API_VERSIONS, 0)
            reason = f"{self._address} has closed the connection"
        except BrokerUnreachable as error:
            if not self._granted:
                raise StartupError(f"{error}: nothing was claimed.") from error
            reason = str(error)
        _say(f"kproxy: severed: {reason}, so {self._shown()} is not ours any more{await self._now_owned_by()}.")
        return SEVERED

    async def _ask(self) -> None:
        wanted = self._wanted.resources
        told = False
        while wanted is None or wanted:
            response = await self._exchange(wanted)
            if response.error_code != NONE:
                raise StartupError(_why_not_served(response, self._address))
            pending = {each.resource for each in response.resources if each.error_code == REQUEST_TIMED_OUT}
            await self._take([each for each in response.resources if each.resource not in pending])
            if not pending:
                return
            if not told:
                told = True
                names = ", ".join(map(resource_text, sorted(pending)))
                _say(f"{names}: claimed, but not confirmed by every proxy and by the partition's broker yet; waiting.")
            if wanted is not None:
                # A claim with 0 has generation 1 now; another request with 0 would make a new claim.
                wanted = tuple(
                    OwnResource(each.resource, max(each.generation, 1)) for each in wanted if each.resource in pending
                )

    async def _exchange(self, resources: tuple[OwnResource, ...] | None) -> OwnResponse:
        body = encode_own_request(OwnRequest(self._wanted.group, resources))
        frame = await self._connection.exchange_frame(OWN, self._version, body, timeout_s=CLAIM_TIMEOUT_S)
        try:
            return parse_own_response(frame, self._version)
        except CodecError as error:
            raise self._connection.unreachable(OWN, error) from error

    async def _take(self, answered: Sequence[OwnedResource]) -> None:
        refused = [each for each in answered if each.error_code != NONE]
        owners = await self._owners() if refused else {}
        for each in answered:
            if each.error_code == NONE:
                self._granted.append(each)
                fence = f", fence {each.fence}" if each.fence >= 0 else ""
                click.echo(f"{resource_text(each.resource)}: granted with generation {each.generation}{fence}")
            else:
                _say(f"kproxy: {resource_text(each.resource)} is refused: {_why_refused(each, owners)}.")

    async def _owners(self) -> dict[str, ClaimRow]:
        """Return the claims by resource, if there is a source to ask."""
        if self._known is None:
            return {}
        try:
            page = await self._known.page(self._wanted.group)
        except StartupError:
            return {}
        return {claim.resource: claim for claim in page.claims}

    async def _now_owned_by(self) -> str:
        """Return the known new owners, for the end of a sentence."""
        owners = await self._owners()
        named = []
        for each in self._granted:
            owner = owners.get(each.resource) or owners.get(WHOLE_GROUP)
            if owner is not None and owner.fence > each.fence:
                owned = f"is owned by {who(owner)} with generation {owner.generation}"
                named.append(f"{resource_text(each.resource)} {owned}")
        return f": {'; '.join(named)}" if named else ""

    def _shown(self) -> str:
        names = ", ".join(resource_text(each.resource) for each in self._granted[:5])
        more = f" and {len(self._granted) - 5} more" if len(self._granted) > 5 else ""
        return f"{names}{more} of group {printable(self._wanted.group)}"


def _why_refused(refused: OwnedResource, owners: dict[str, ClaimRow]) -> str:
    if refused.error_code == COORDINATOR_NOT_AVAILABLE:
        return "the proxy gets no answer from etcd; try again"
    if refused.error_code == UNKNOWN_TOPIC_OR_PARTITION:
        return "no broker has such a partition; create the topic, or have a client ask for it, and claim again"
    if refused.error_code == THROTTLING_QUOTA_EXCEEDED:
        return "the limit of claims in etcd is reached; free some and try again"
    if refused.error_code != FENCED_INSTANCE_ID:
        return f"the proxy answers {name_of(refused.error_code)}"
    owner = owners.get(refused.resource) or owners.get(WHOLE_GROUP)
    way_out = "claim it with 0 to take it at any generation"
    if owner is None:
        return f"somebody owns it with a higher generation (`kproxy own list` shows who); {way_out}"
    return (
        f"{who(owner)} owns it with generation {owner.generation}; claim it with {owner.generation} or more to take it "
        f"over, or with 0 whatever its generation"
    )


def _why_not_served(response: OwnResponse, address: Address) -> str:
    if response.error_code == COORDINATOR_NOT_AVAILABLE:
        return f"the proxy at {address} gets no answer from etcd, where claims are settled: try again."
    return f"the proxy at {address} refuses the claim: {name_of(response.error_code)}."


def _say(line: str) -> None:
    click.echo(line, err=True)
