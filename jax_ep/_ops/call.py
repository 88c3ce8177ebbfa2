"""Call: the static description of one operation, shared by every layer below the public ops."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_ep import _config
from jax_ep._config import Layout, Mode, Pad
from jax_ep._fp8_format import FP8
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
        wire: what its rows are quantised to on their way; None: nothing.
        keeps_records: rows arrive as they travelled, not dequantised.
        scales_in_columns: of those, scales have their last two axes exchanged.
        row_bytes: rows are opaque, and have so many bytes; None: H elements of dtype.
        counts_load: `Group.stats` counts the pairs of its plan as load of experts.
    """

    group: Group
    mode: Mode
    layout: Layout
    num_tokens: int
    pad: Pad = "zero"
    wire: FP8 | None = None
    keeps_records: bool = False
    scales_in_columns: bool = False
    row_bytes: int | None = None
    counts_load: bool = True

    @property
    def for_tokens(self) -> Call:
        """This call, where what is dispatched are tokens."""
        return dataclasses.replace(self, wire=self.group.config.wire)

    @property
    def for_cotangents(self) -> Call:
        """This call, where what is dispatched are cotangents."""
        config = self.group.config
        wire = config.wire if config.wire_backward else None
        return dataclasses.replace(self, wire=wire, keeps_records=False, scales_in_columns=False)

    @property
    def rows(self) -> int:
        """Receive rows R."""
        group = self.group
        return _config.receive_rows(group.config, group.num_ranks, self.num_tokens, self.layout)

    @property
    def hidden(self) -> int:
        """Elements H of a row; of an opaque one, elements of dtype that take as many bytes."""
        if self.row_bytes is not None:
            return self.row_bytes // int(self.dtype.itemsize)
        return self.group.config.hidden

    @property
    def num_slots(self) -> int:
        """Expert slots P of the group: ids of a plan are below it."""
        return _config.physical_experts(self.group.config)

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
        return (self.num_slots, config.top_k, config.align, self.hidden)

    @property
    def maker(self) -> tuple[int | str, ...]:
        """Which group or view of it made the call, equal on all processes and in every run."""
        group = self.group
        return (group.session_id, *self.sizes, self.rows, group.config.overflow)

    @property
    def recv_shape(self) -> tuple[int, ...]:
        """Shape of `Received.x`."""
        return (*self.recv_rows_shape, self.hidden)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Shape of the scales of `Received.x` where it keeps records."""
        assert self.wire is not None
        *leading, rows = self.recv_rows_shape
        num_blocks = self.hidden // self.wire.block
        last = (num_blocks, rows) if self.scales_in_columns else (rows, num_blocks)
        return (*leading, *last)

    @property
    def recv_rows_shape(self) -> tuple[int, ...]:
        """The leading axes of what is received, row by row."""
        ranks = self.group.num_ranks
        if self.layout == "expert_batched":
            return (self.group.experts_per_rank, ranks * self.num_tokens)
        if self.layout == "rank_major":
            return (ranks, self.num_tokens)
        return (self.rows,)
