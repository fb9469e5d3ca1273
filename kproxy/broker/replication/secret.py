"""The secret by which the brokers of a cluster know each other, kept in etcd; whichever broker comes first makes it."""

from __future__ import annotations

import secrets

from kproxy.broker.agreed import agreed_value
from kproxy.broker.keys import Keys
from kproxy.broker.replication.sasl import Secret
from kproxy.errors import StartupError
from kproxy.etcd import EtcdClient

SECRET_BYTES = 32


class SharedSecret:
    """The secret as last read: `load` it once before anything else, and again when etcd's history may be another."""

    def __init__(self, client: EtcdClient, keys: Keys) -> None:
        self._client = client
        self._key = keys.replication_secret
        self._secret: Secret | None = None

    @property
    def current(self) -> Secret:
        if self._secret is None:
            raise RuntimeError("the replication secret is asked for before it has been loaded")
        return self._secret

    async def load(self) -> None:
        """Raises EtcdError, StartupError."""
        # An etcd that has lost it is told what its brokers remember.
        proposal = self._secret.text if self._secret is not None else secrets.token_urlsafe(SECRET_BYTES)
        stored = await agreed_value(self._client, self._key, proposal.encode())
        try:
            text = stored.decode("ascii")
            if self._secret is None or self._secret.text != text:
                self._secret = Secret.of(text)
        except ValueError as error:
            raise StartupError(
                f"etcd's key {self._key} holds no usable secret ({error}): "
                f"stop every broker, delete the key, and the first one to start makes another"
            ) from error
