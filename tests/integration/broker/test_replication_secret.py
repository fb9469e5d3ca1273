"""The secret of a cluster's brokers: the first broker creates it, and all keep it."""

from __future__ import annotations

import asyncio

import pytest

from kproxy.broker.keys import Keys
from kproxy.broker.replication.authentication import SharedSecret
from kproxy.errors import StartupError
from kproxy.etcd import EtcdClient, delete_op, put_op


async def test_first_broker_creates_the_secret(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    brokers = [SharedSecret(etcd_client, Keys(etcd_prefix)) for _ in range(5)]
    await asyncio.gather(*(each.load() for each in brokers))
    (text,) = {each.current.text for each in brokers}
    assert len(text) >= 43, "256 bits, in base 64"
    stored = await etcd_client.get(f"{etcd_prefix}/refbroker/replication-secret")
    assert stored is not None
    assert (stored.value.decode(), stored.lease_id) == (text, 0), "it outlives every broker"
    other = SharedSecret(etcd_client, Keys(f"{etcd_prefix}/another"))
    await other.load()
    assert other.current.text != text


async def test_lost_secret_is_restored_from_brokers_memory(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    """Otherwise brokers that were not restarted since could not authenticate those that were."""
    keys = Keys(etcd_prefix)
    remembering, new = SharedSecret(etcd_client, keys), SharedSecret(etcd_client, keys)
    await remembering.load()
    before = remembering.current
    await etcd_client.txn([], [delete_op(keys.replication_secret)])
    await remembering.load()
    await new.load()
    assert remembering.current is before
    assert new.current.text == before.text


async def test_replaced_secret_is_read_on_reload(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    keys = Keys(etcd_prefix)
    secret = SharedSecret(etcd_client, keys)
    await secret.load()
    await etcd_client.txn([], [put_op(keys.replication_secret, b"chosen by the operator")])
    await secret.load()
    assert secret.current.text == "chosen by the operator"


@pytest.mark.parametrize("value", [b"", b"short", b"\xff" * 40, b"with a \x00 in it, and long enough"])
async def test_invalid_secret_is_refused(etcd_client: EtcdClient, etcd_prefix: str, value: bytes) -> None:
    keys = Keys(etcd_prefix)
    secret = SharedSecret(etcd_client, keys)
    await secret.load()
    before = secret.current
    await etcd_client.txn([], [put_op(keys.replication_secret, value)])
    with pytest.raises(StartupError, match=rf"{keys.replication_secret} holds no usable secret.*delete the key"):
        await secret.load()
    assert secret.current is before
    with pytest.raises(StartupError):
        await SharedSecret(etcd_client, keys).load()
