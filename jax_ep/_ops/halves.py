"""Halves of which the start does nothing: what it was given is carried to the done, which does all.

That is so in `implementation="xla"`, and on GPUs in mode ht: a kernel that copied or pushed rows in
the start would take longer than the whole call, and hold memory for each start that is open. With
Config.overlap XLA starts the whole call as soon as its operands are there (beside.py). It is also
so there of calls of mode ll that take rounds: their rows would not fit the room of one start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._ops.call import Call
from jax_ep._ops.operations import OPERATIONS

Run = Callable[[str, Call, Mapping[str, jax.Array | None]], dict[str, Any]]


def has_gpu_starts(call: Call) -> bool:
    """Whether starts of `call` move rows on GPUs; no, where nobody knows."""
    return call.mode == "ll" and call.num_tokens <= call.group._ll_round_tokens


def check_batch(operation: str, call: Call, size: int) -> None:
    """Raises if the starts of a vmap over `size` elements hold more sets than there are.

    XLA may make them all before the first done. Of a lowering-only group nobody knows whether they
    hold any: its session says so when the program runs.
    """
    group = call.group
    is_held = group.native and (group.platform == "cpu" or has_gpu_starts(call))
    limit = group.config.max_in_flight
    if operation.endswith("_start") and call.num_tokens > 0 and is_held and size > limit:
        start = operation.removeprefix("ll_")
        raise ValueError(
            f"jax_ep.{start}: got a vmap over {size} calls, expected at most max_in_flight={limit} "
            f"starts that are open at a time; call jax_ep.{start.removesuffix('_start')} under "
            "vmap, or raise Config.max_in_flight"
        )


def all_in_done(run: Run) -> Run:
    """`run`, which knows whole operations alone, for halves as well."""

    def run_any(
        operation: str, call: Call, arrays: Mapping[str, jax.Array | None]
    ) -> dict[str, Any]:
        if operation.endswith("_start"):
            return {"epoch": jnp.zeros((1,), jnp.int32)}  # nothing is open that it could name
        given = {name: array for name, array in arrays.items() if name != "epoch"}
        results = run(operation.removesuffix("_done"), call, given)
        return {name: results[name] for name in OPERATIONS[operation].results}

    return run_any
