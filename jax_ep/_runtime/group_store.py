"""JSON records that a group keeps in JAX's key-value store, sealed with the job's secret."""

from __future__ import annotations

import json
from typing import Any

from jax_ep._runtime import seal
from jax_ep._runtime.store import Store


class GroupStore:
    """Records by name, below a prefix."""

    def __init__(self, store: Store, prefix: str, secret: bytes):
        """Args: the store, where the group's keys begin, the secret."""
        self.store = store
        self.prefix = prefix
        self.secret = secret

    def put(self, name: str, record: Any, *, overwrite: bool = False) -> bool:
        """Writes it; False if there is one already, which stays."""
        key = f"{self.prefix}/{name}"
        sealed = seal.seal(self.secret, key, json.dumps(record).encode())
        if not overwrite:
            return self.store.insert(key, sealed)
        self.store.overwrite(key, sealed)
        return True

    def get(self, name: str) -> Any:
        """The record, or None."""
        key = f"{self.prefix}/{name}"
        stored = self.store.get(key)
        return None if stored is None else json.loads(seal.unseal(self.secret, key, stored))

    def folder(self, name: str) -> dict[int, Any]:
        """The records below it, whose last names are numbers."""
        folder = f"{self.prefix}/{name}"
        return {
            int(number): json.loads(seal.unseal(self.secret, f"{folder}/{number}", stored))
            for number, stored in self.store.folder(folder).items()
        }

    def count(self, name: str) -> int:
        """Adds one to a counter; its new value."""
        return self.store.count(f"{self.prefix}/{name}")

    def delete(self, name: str) -> None:
        """The record, or all below it."""
        self.store.remove(f"{self.prefix}/{name}")
