"""Grouped matrix products as Pallas kernels, for experts fed by `recv.x` and `recv.group_sizes`.

`import jax_ep` does not import this package; `import jax_ep.pallas` does.
"""

from jax_ep.pallas._ffn import grouped_ffn as grouped_ffn
from jax_ep.pallas._fp8 import grouped_ffn_fp8 as grouped_ffn_fp8
from jax_ep.pallas._matmul import grouped_matmul as grouped_matmul
from jax_ep.pallas._tokamax import tokamax_ffn as tokamax_ffn

__all__ = ["grouped_ffn", "grouped_ffn_fp8", "grouped_matmul", "tokamax_ffn"]
