"""Session ids: equal on all processes, and in every run of the same program.

Equal groups (same mesh shape, axes and Config) are numbered in the order of their creation.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import threading
from typing import Any

from jax_ep import _config
from jax_ep._config import Config

_lock = threading.Lock()
_counts: collections.Counter[str] = collections.Counter()


class SessionNumber:
    """The number of one group among the equal ones of this process."""

    def __init__(
        self, mesh: Any, axes: tuple[str, ...], config: Config, *, lowering_only: bool
    ) -> None:
        """Takes the next number."""
        fields = dataclasses.asdict(config) | {
            "dtype": config.dtype.name,
            "peer_timeout_s": _config.peer_timeout_s(config),
        }
        # Ids of programs that were saved before there were such fields.
        for name in ("elastic", "batch_invariant", "physical_experts"):
            if not fields[name]:
                del fields[name]
        self._key = json.dumps([list(mesh.shape.items()), list(axes), fields], sort_keys=True)
        # Lowering-only groups are counted apart: the n-th of them has the id of the n-th real one,
        # so a program exported on another host meets its session.
        self._counted_as = f"{'lower' if lowering_only else 'run'}:{self._key}"
        with _lock:
            self.value = _counts[self._counted_as]
            _counts[self._counted_as] += 1

    @property
    def session_id(self) -> int:
        """Signed 64-bit id."""
        text = f"{self._key}#{self.value}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def agree(self, number: int) -> None:
        """Takes `number` instead: the largest of the processes, some of which have more groups."""
        with _lock:
            _counts[self._counted_as] = max(_counts[self._counted_as], number + 1)
        self.value = number

    def give_back(self) -> None:
        """The group was not created: the next one gets the number, if none took a later one."""
        with _lock:
            if _counts[self._counted_as] == self.value + 1:
                _counts[self._counted_as] = self.value
