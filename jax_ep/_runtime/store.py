"""JSON records of one group in JAX's key-value store, sealed with the job's secret."""

from __future__ import annotations

import json
from typing import Any

from jax_ep._runtime import seal


class Store:
    """Records by name, below a prefix."""

    def __init__(self, client: Any, prefix: str, secret: bytes):
        """Args: `_jax_compat.distributed_client()`, where the group's keys begin, the secret."""
        self.client = client
        self.prefix = prefix
        self.secret = secret

    def put(self, name: str, record: Any, *, overwrite: bool = False) -> bool:
        """Writes it; False if there is one already, which stays."""
        key = f"{self.prefix}/{name}"
        text = seal.seal(self.secret, key, json.dumps(record).encode())
        try:
            self.client.key_value_set_bytes(key, text, allow_overwrite=overwrite)
        except Exception as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def get(self, name: str) -> Any:
        """The record, or None."""
        key = f"{self.prefix}/{name}"
        try:
            stored = self.client.key_value_try_get_bytes(key)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
        return json.loads(seal.unseal(self.secret, key, stored))

    def folder(self, name: str) -> dict[int, Any]:
        """The records below it, whose last names are numbers."""
        folder = f"{self.prefix}/{name}/"
        return {
            int(key.rpartition("/")[2]): json.loads(seal.unseal(self.secret, key, stored))
            for key, stored in self.client.key_value_dir_get_bytes(folder)
        }

    def delete(self, name: str) -> None:
        """The record, or all below it."""
        self.client.key_value_delete(f"{self.prefix}/{name}")
