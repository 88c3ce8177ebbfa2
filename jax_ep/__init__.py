"""Expert-parallel dispatch and combine for JAX (docs/semantics.md has shapes and math)."""

import pkgutil as _pkgutil
import typing as _typing

# In a checkout this folder shadows the installed package, which holds the compiled jax_ep._core.
__path__ = _pkgutil.extend_path(__path__, __name__)

from jax_ep import eplb as eplb
from jax_ep import fp8 as fp8
from jax_ep import routing as routing
from jax_ep._config import Config as Config
from jax_ep._config import Layout as Layout
from jax_ep._config import Mode as Mode
from jax_ep._config import Pad as Pad
from jax_ep._create_group import create_group as create_group
from jax_ep._fp8_format import FP8 as FP8
from jax_ep._group import Group as Group
from jax_ep._group import Health as Health
from jax_ep._memory import Memory as Memory
from jax_ep._moe import moe as moe
from jax_ep._ops.api import block_until_ready as block_until_ready
from jax_ep._ops.api import combine as combine
from jax_ep._ops.api import combine_done as combine_done
from jax_ep._ops.api import combine_start as combine_start
from jax_ep._ops.api import dispatch as dispatch
from jax_ep._ops.api import dispatch_done as dispatch_done
from jax_ep._ops.api import dispatch_start as dispatch_start
from jax_ep._ops.api import export_checks as export_checks
from jax_ep._ops.api import plan as plan
from jax_ep._ops.api import wait as wait
from jax_ep._ops.quantized import dispatch_bytes as dispatch_bytes
from jax_ep._ops.quantized import dispatch_quantized as dispatch_quantized
from jax_ep._overlap import overlap as overlap
from jax_ep._overlap import overlap_gradients as overlap_gradients
from jax_ep._placement import Placement as Placement
from jax_ep._runtime.bootstrap import BootstrapError as BootstrapError
from jax_ep._stats import FlowStats as FlowStats
from jax_ep._stats import GroupStats as GroupStats
from jax_ep._stats import RankStats as RankStats
from jax_ep._types import ExchangeStats as ExchangeStats
from jax_ep._types import InFlight as InFlight
from jax_ep._types import Plan as Plan
from jax_ep._types import Quantized as Quantized
from jax_ep._types import Received as Received
from jax_ep._types import ReceivedQuantized as ReceivedQuantized
from jax_ep._version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from jax_ep._launch.initialize import initialize as initialize

__all__ = [
    "FP8",
    "BootstrapError",
    "Config",
    "ExchangeStats",
    "FlowStats",
    "Group",
    "GroupStats",
    "Health",
    "InFlight",
    "Layout",
    "Memory",
    "Mode",
    "Pad",
    "Placement",
    "Plan",
    "Quantized",
    "RankStats",
    "Received",
    "ReceivedQuantized",
    "combine",
    "combine_done",
    "combine_start",
    "create_group",
    "dispatch",
    "dispatch_bytes",
    "dispatch_done",
    "dispatch_quantized",
    "dispatch_start",
    "eplb",
    "export_checks",
    "fp8",
    "initialize",
    "moe",
    "overlap",
    "overlap_gradients",
    "plan",
    "routing",
    "wait",
]


def __getattr__(name: str) -> _typing.Any:
    """Imports `initialize` on first use; most programs in one process never need it."""
    if name == "initialize":
        from jax_ep._launch.initialize import initialize

        return initialize
    raise AttributeError(f"module 'jax_ep' has no attribute {name!r}")


def __dir__() -> list[str]:
    """All names, also those that are imported on first use."""
    return sorted({*globals(), *__all__})
