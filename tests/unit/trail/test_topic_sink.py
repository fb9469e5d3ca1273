"""The client of the trail's topic towards a broker that is not to be trusted."""

from __future__ import annotations

import base64

import pytest
from kafka.net.sasl import get_sasl_mechanism
from scramp import ScramMechanism

from kproxy.trail.topic_sink import CarefulScram

SECRET = "the password"


@pytest.mark.parametrize("name", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_no_proof_is_given_for_few_iterations(name: str) -> None:
    """Whoever answers in the broker's place could guess the password from it."""
    assert get_sasl_mechanism(name) is CarefulScram
    for iterations in ("", "0", "1", "4095", "x", "4096"):
        client = CarefulScram(sasl_plain_username="u", sasl_plain_password=SECRET, sasl_mechanism=name)
        nonce = client.auth_bytes().decode().partition("r=")[2]
        first = f"r={nonce}x,s={base64.b64encode(b'salt').decode()},i={iterations}".encode()
        if iterations == "4096":
            assert not client.receive(first)
            assert client.auth_bytes().startswith(b"c=biws,r=")
            continue
        with pytest.raises(ValueError, match="iterations") as raised:
            client.receive(first)
        assert SECRET not in str(raised.value)


def test_password_is_proven_to_a_knowing_broker() -> None:
    kind = ScramMechanism("SCRAM-SHA-512")
    info = kind.make_auth_info(SECRET, iteration_count=4_096)
    server = kind.make_server(lambda username: info)
    client = CarefulScram(sasl_plain_username="u", sasl_plain_password=SECRET, sasl_mechanism="SCRAM-SHA-512")
    server.set_client_first(client.auth_bytes().decode())
    client.receive(server.get_server_first().encode())
    server.set_client_final(client.auth_bytes().decode())
    assert client.receive(server.get_server_final().encode())
