"""Rows in FP8: quantised and back, on any platform (docs/fp8.md)."""

from jax_ep._ops.fp8 import dequantize as dequantize
from jax_ep._ops.fp8 import quantize as quantize
from jax_ep._ops.fp8 import quantize_weights as quantize_weights
from jax_ep._ops.fp8 import rows as rows

__all__ = ["dequantize", "quantize", "quantize_weights", "rows"]
