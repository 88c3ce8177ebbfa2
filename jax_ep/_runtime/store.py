"""The key-value store of jax.distributed, as far as groups need it."""

from __future__ import annotations

from typing import Any


class Store:
    """Keys are paths, values bytes. No call waits longer than told.

    Every method is one request (tests/jax_ep/test_bootstrap.py counts them), and raises what the
    client raises when the service cannot be reached.
    """

    def __init__(self, client: Any):
        self._client = client

    def insert(self, key: str, value: bytes) -> bool:
        """Stores `value`; False: the key exists, and keeps what it has."""
        try:
            self._client.key_value_set_bytes(key, value)
        except Exception as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def overwrite(self, key: str, value: bytes) -> None:
        """Stores `value`, whatever the key has."""
        self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str) -> bytes | None:
        """The value of `key`; None: it is not there."""
        try:
            value: bytes = self._client.key_value_try_get_bytes(key)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
        return value

    def wait(self, key: str, seconds: float) -> bytes | None:
        """The value of `key` once it is there; None: not within `seconds`."""
        try:
            value: bytes = self._client.blocking_key_value_get_bytes(
                key, max(1, int(seconds * 1000))
            )
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        return value

    def count(self, key: str) -> int:
        """Adds one to a counter; its new value."""
        return int(self._client.key_value_increment(key, 1))

    def folder(self, path: str) -> dict[str, bytes]:
        """What is stored under `path`/ at this moment, by the rest of its key."""
        found = self._client.key_value_dir_get_bytes(path)
        return {key[len(path) + 1 :]: value for key, value in found}

    def remove(self, path: str) -> None:
        """Removes the key, or everything under `path`/."""
        self._client.key_value_delete(path)
