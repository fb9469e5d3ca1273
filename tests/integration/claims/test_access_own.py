"""Claims of the Own API require the operation `own` for their group."""

from __future__ import annotations

from pathlib import Path

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy_codec.api_keys import OWN
from kproxy_codec.error_codes import GROUP_AUTHORIZATION_FAILED, NONE
from kproxy_codec.framing import request_header
from kproxy_codec.own import OwnRequest, encode_own_request, parse_own_response
from tests.support.clients.raw_client import RawClient, raw_frame
from tests.support.processes.dev import serving
from tests.support.processes.served import port_of
from tests.support.security import sasl_client as sasl

RULES = """
[[acls]]
principal = "User:alice"
operations = ["own"]
groups = ["writers"]
[[acls]]
principal = "User:alice"
operations = ["read", "describe"]
groups = ["readers"]
"""


async def test_claim_needs_its_own_operation(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    config = tmp_path / "kproxy.toml"
    config.write_text(
        f'[ownership]\netcd = "{etcd.endpoint}"\nprefix = "/{tmp_path.name}"\n'
        f'[sasl]\nmechanisms = "PLAIN"\nusers = "{sasl.users_file(tmp_path)}"\nwithout_tls = true\n{RULES}'
    )
    with serving(["serve", "--config", config, "--listen", "127.0.0.1:0"], tmp_path / "stderr") as process:
        client = await RawClient().connect(port_of(process))
        await sasl.log_in(client)
        for group, code in (("readers", GROUP_AUTHORIZATION_FAILED), ("writers", NONE)):
            # An empty list binds the group to the connection.
            body = encode_own_request(OwnRequest(group, ()))
            client.send(raw_frame(request_header(OWN, 1, 7, b"tests") + body))
            response = parse_own_response(await client.receive(), 1)
            assert (response.error_code, response.group) == (code, group)
        client.abort()
