"""Memory: what a rank of a group takes. The sizes of heaps are C++'s, asked for without a group."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from jax_ep import _extension, _gpu_library

Platform = Literal["cpu", "gpu", "xla"]


@dataclasses.dataclass(frozen=True)
class RowsMemory:
    """What a dispatch delivers in one layout.

    Args:
        recv_rows: receive rows R.
        recv_bytes: bytes of `Received.x`, R rows of hidden elements in Config.dtype.
    """

    recv_rows: int
    recv_bytes: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """What one rank of a group takes; made by `Config.memory` and `Group.memory`.

    Args:
        platform: "cpu", "gpu" (native groups there) or "xla".
        num_tokens: tokens per rank T that the rows are for.
        heap_bytes: exchange buffers that the rank holds until `close`: on CPUs host memory, on GPUs
            device memory, which the driver rounds up. 0 with "xla". None: see `unknown`.
        network_stage_bytes: memory of the rank for rows between nodes, on GPUs; else 0. Pinned host
            memory, or its GPU's where Config.transport is "cuda" or NICs reach it
            (JAX_EP_GPU_DIRECT). None: see `unknown`.
        expert_major: rows of a dispatch in that layout; XLA allocates them per call.
        expert_batched: the same.
        rank_major: the same.
        unknown: why the heap's size is not known here, or "".
    """

    platform: Platform
    num_tokens: int
    heap_bytes: int | None
    network_stage_bytes: int | None
    expert_major: RowsMemory
    expert_batched: RowsMemory
    rank_major: RowsMemory
    unknown: str = ""

    def __str__(self) -> str:
        """One line for people."""
        parts = [f"R = {self.expert_major.recv_rows} for T = {self.num_tokens}"]
        if self.heap_bytes is None:
            parts.append(f"heap not known ({self.unknown})")
        else:
            parts.append(f"heap {self.heap_bytes} bytes per rank")
        if self.network_stage_bytes:
            parts.append(f"network stage {self.network_stage_bytes} bytes per rank")
        return ", ".join(parts)


def check_platform(operation: str, platform: object) -> None:
    """ValueError unless there is such a platform; `operation` is who asks."""
    if platform not in get_args(Platform):
        listed = ", ".join(map(repr, get_args(Platform)))
        raise ValueError(
            f"{operation}: got platform={platform!r}, expected one of {listed}; use 'gpu' for CUDA "
            "and ROCm"
        )


def measure(
    operation: str,
    shape: Mapping[str, Any],
    platform: Platform,
    num_tokens: int,
    *,
    recv_rows: Mapping[str, int],
    row_bytes: int,
) -> Memory:
    """The Memory of a rank.

    Args:
        operation: who asks, for the error.
        shape: arguments of `_core.GroupShape`.
        platform: where the group's operations run.
        num_tokens: T.
        recv_rows: R by layout.
        row_bytes: bytes of a row.

    Raises:
        ValueError: there is no such platform.
    """
    check_platform(operation, platform)
    heap, stage, unknown = _exchange_bytes(shape, platform)
    return Memory(
        platform=platform,
        num_tokens=num_tokens,
        heap_bytes=heap,
        network_stage_bytes=stage,
        unknown=unknown,
        **{layout: RowsMemory(rows, rows * row_bytes) for layout, rows in recv_rows.items()},
    )


def _exchange_bytes(
    shape: Mapping[str, Any], platform: Platform
) -> tuple[int | None, int | None, str]:
    """Bytes of a rank's heap and network stage, or None twice and the reason."""
    if platform == "xla":
        return 0, 0, ""
    try:
        core = _extension.load()
        group_shape = core.GroupShape(**shape)
        if platform == "cpu":
            return core.heap_bytes(group_shape), 0, ""
        heap, stage = core.gpu_memory_bytes(_gpu_library.path(), group_shape)
    except (ImportError, NotImplementedError) as error:
        return None, None, str(error)
    return heap, stage, ""
