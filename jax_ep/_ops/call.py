"""Call: the static description of one operation, shared by every layer below the public ops."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_ep._config import Layout, Mode, Pad
from jax_ep._group import Group


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in one operation; hashable, so that it may steer custom VJPs.

    Args:
        group: the group (by identity).
        mode: "ht" or "ll".
        layout: of the received rows.
        num_tokens: T.
        pad: what unused rows of a dispatch hold.
    """

    group: Group
    mode: Mode
    layout: Layout
    num_tokens: int
    pad: Pad = "zero"

    @property
    def rows(self) -> int:
        """Receive rows R."""
        return self.group.recv_rows(self.num_tokens, self.layout)

    @property
    def hidden(self) -> int:
        """Elements H of a row."""
        return self.group.config.hidden

    @property
    def top_k(self) -> int:
        """Expert slots K of a token."""
        return self.group.config.top_k

    @property
    def dtype(self) -> Any:
        """Type of rows."""
        return self.group.config.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """What calls of one group may differ in (Group.view), as xla_ffi/buffers.h has them."""
        config = self.group.config
        return (config.num_experts, config.top_k, config.align, config.hidden)

    @property
    def maker(self) -> tuple[int | str, ...]:
        """Which group or view of it made the call, equal on all processes and in every run."""
        group = self.group
        return (group.session_id, *self.sizes, self.rows, group.config.overflow)

    @property
    def recv_shape(self) -> tuple[int, int] | tuple[int, int, int]:
        """Shape of `Received.x`."""
        ranks = self.group.num_ranks
        if self.layout == "expert_batched":
            return (self.group.experts_per_rank, ranks * self.num_tokens, self.hidden)
        if self.layout == "rank_major":
            return (ranks, self.num_tokens, self.hidden)
        return (self.rows, self.hidden)
