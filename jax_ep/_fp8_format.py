"""FP8: the format of quantised rows, and the sizes that follow from it (docs/semantics.md)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

Scale = Literal["float32", "ue8m0"]

RECORD_ALIGN = 32  # bytes; GPUs move rows in such sectors


@dataclasses.dataclass(frozen=True)
class FP8:
    """Rows of float8_e4m3fn, with one scale for each `block` elements along hidden.

    "float32" with blocks of 128 is what DeepSeek-V3 trains with (arXiv 2412.19437, section 3.3) and
    its grouped products take on Hopper GPUs. Scales of "ue8m0" are powers of two, one byte each.

    Args:
        block: elements that share a scale; must divide hidden.
        scale: "float32", or "ue8m0".

    Raises:
        ValueError: block is no count, or there is no such scale.

    Example:
        >>> config = jax_ep.Config(
        ...     num_experts=8, top_k=2, hidden=256, max_tokens=128, wire=jax_ep.FP8(block=128)
        ... )
    """

    block: int = 128
    scale: Scale = "float32"

    def __post_init__(self) -> None:
        """Validates what needs no hidden."""
        is_int = isinstance(self.block, (int, np.integer)) and not isinstance(self.block, bool)
        if not is_int or not 1 <= self.block < 2**31:
            raise ValueError(f"FP8.block: got {self.block!r}, expected an int of at least 1")
        object.__setattr__(self, "block", int(self.block))
        if self.scale not in get_args(Scale):
            raise ValueError(f"FP8.scale: got {self.scale!r}, expected one of {get_args(Scale)}")

    @property
    def scale_dtype(self) -> Any:
        """float32 or float8_e8m0fnu."""
        return np.dtype(jnp.float32 if self.scale == "float32" else jnp.float8_e8m0fnu)

    def scale_bytes(self, hidden: int) -> int:
        """Bytes of a row's scales."""
        return hidden // self.block * int(self.scale_dtype.itemsize)

    def record_bytes(self, hidden: int) -> int:
        """Bytes of a row of `hidden` elements on the wire: its values, its scales, padding."""
        return -(-(hidden + self.scale_bytes(hidden)) // RECORD_ALIGN) * RECORD_ALIGN

    def misfit(self, hidden: int, dtype: Any) -> str:
        """What rows of `hidden` elements of `dtype` would need; "" if they can travel so."""
        if hidden % self.block:
            return f"a block that divides hidden={hidden}; use {_divisor(hidden, self.block)}"
        in_dtype = hidden * np.dtype(dtype).itemsize
        if self.record_bytes(hidden) > in_dtype:
            return (
                f"rows of at most the {in_dtype} bytes that they have in {np.dtype(dtype).name}, "
                f"not {self.record_bytes(hidden)}; use a larger block"
            )
        return ""


def _divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` up to `at_most`."""
    return next(n for n in range(min(at_most, number), 0, -1) if number % n == 0)
