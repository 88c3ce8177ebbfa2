"""FP8: the format of quantised rows, and the sizes that follow from it (docs/semantics.md)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

Scale = Literal["float32", "ue8m0"]

RECORD_ALIGN = 32  # bytes; GPUs move rows in such sectors
MIN_PRODUCT_BLOCK = 32  # the least depth of products in FP8 (jax_ep/pallas/_kernels.py)


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
            raise ValueError(
                f"FP8.block: got {self.block!r}, expected an int of at least 1 and below 2**31"
            )
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
        in_dtype = hidden * np.dtype(dtype).itemsize
        wrong = ""
        if hidden % self.block:
            wrong = f"a block that divides hidden={hidden}"
        elif self.record_bytes(hidden) > in_dtype:
            wrong = (
                f"rows of at most the {in_dtype} bytes that they have in {np.dtype(dtype).name}, "
                f"not {self.record_bytes(hidden)}"
            )
        if not wrong:
            return ""
        fitting = [
            block
            for block in range(1, hidden + 1)
            if hidden % block == 0
            and dataclasses.replace(self, block=block).record_bytes(hidden) <= in_dtype
        ]
        if not fitting:
            return f"{wrong}; no block makes them fit"
        smaller = [block for block in fitting if block <= self.block]
        return f"{wrong}; use {smaller[-1] if smaller else fitting[0]}"

    def product_misfit(self, hidden: int) -> str:
        """What products in FP8 (`jax_ep.pallas.grouped_ffn_fp8`) would need of rows; "" if none."""
        block = self.block
        if hidden % block == 0 and block >= MIN_PRODUCT_BLOCK and not block & (block - 1):
            return ""
        largest = hidden & -hidden  # power of two
        fix = f"use {min(largest, 128)}" if largest >= MIN_PRODUCT_BLOCK else "no block does"
        return (
            f"a block that is a power of two of at least {MIN_PRODUCT_BLOCK} and divides "
            f"hidden={hidden}; {fix}"
        )
