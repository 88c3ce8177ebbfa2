"""Mixture-of-experts layers for Flax: `MoE` for NNX, `linen.MoE` for Linen (docs/flax.md).

`import jax_ep` does not import this package; it needs Flax (`pip install 'jax_ep[flax]'`).
"""

from jax_ep.flax import _installed as _installed
from jax_ep.flax import linen as linen
from jax_ep.flax import presets as presets
from jax_ep.flax._config import MoEConfig as MoEConfig
from jax_ep.flax._layer import ExpertFn as ExpertFn
from jax_ep.flax._layer import MoEStats as MoEStats
from jax_ep.flax._layer import ragged_ffn as ragged_ffn
from jax_ep.flax._layer import updated_bias as updated_bias
from jax_ep.flax._nnx import ExpertParam as ExpertParam
from jax_ep.flax._nnx import MoE as MoE
from jax_ep.flax._nnx import RouterBias as RouterBias
from jax_ep.flax._placement import Placement as Placement

__all__ = [
    "ExpertFn",
    "ExpertParam",
    "MoE",
    "MoEConfig",
    "MoEStats",
    "Placement",
    "RouterBias",
    "linen",
    "presets",
    "ragged_ffn",
    "updated_bias",
]
