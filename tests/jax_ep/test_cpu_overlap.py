"""On CPUs too other work of a program runs while an exchange waits for a rank: XLA gets a Future.

XLA runs what needs nothing of the exchange, and no memory of it: it gives memory of temporary
arrays away in the order of its schedule, so what the exchange reads is a result of the program
here. In programs of eight thunks or fewer it runs one after the other.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, assert_same_bits, group_of, inputs_of, per_rank, put

import jax_ep

Array = jax.Array
CASE = Case(ranks=2, tokens=16, hidden=64)
# Products of rank 0. The first may come before the exchange, the others are counted.
FIRST, STEPS = 4, 10
LIMIT_S = 30.0  # only that a mistake ends

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="XLA's thunks on CPUs")


class Watch:
    """What rank 0 computes while its exchange waits for rank 1, which is held back until then."""

    def __init__(self, group: jax_ep.Group) -> None:
        self.group = group
        self.deadline = time.monotonic() + LIMIT_S
        self.steps: list[int] = []  # that ended while rank 0 waited for rank 1, which was held
        self.is_held = True
        self.all_done = threading.Event()

    def note(self, rank: Array, step: Array, product: Array) -> np.ndarray:
        """Behind a product."""
        if int(rank) == 0 and int(step) >= FIRST and self._is_waiting():
            self.steps.append(int(step))
            if len(self.steps) == STEPS - FIRST:
                self.all_done.set()
        return np.zeros_like(product)

    def hold(self) -> np.ndarray:
        """Before the exchange of rank 1: until rank 0 is through with its products."""
        self.all_done.wait(self.deadline - time.monotonic())
        self.is_held = False
        return np.zeros((), np.float32)

    def _is_waiting(self) -> bool:
        while self.is_held and time.monotonic() < self.deadline:
            if re.search(r"\n  rank 0, .*waits for rank 1 ", self.group.report()):
                return self.is_held
            time.sleep(0.01)
        return False


def exchange(kind: str, group: jax_ep.Group, rows: Array, plan: Any) -> Any:
    """What it moves, and all that it reads while it waits."""
    if kind == "dispatch":
        return jax_ep.dispatch(group, rows, plan=plan).x, rows
    if kind == "dispatch in halves":
        flight = jax_ep.dispatch_start(group, rows, plan=plan)
        return jax_ep.dispatch_done(group, flight).x, rows, flight.epoch
    return jax_ep.combine(group, rows, plan, weights=None), rows


@pytest.mark.parametrize("kind", ["dispatch", "dispatch in halves", "combine"])
@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_products_run_while_an_exchange_waits_for_a_rank(mode: Any, kind: str, native: str) -> None:
    group, inputs = group_of(CASE, native), inputs_of(CASE)
    plan = per_rank(group, lambda ids: jax_ep.plan(group, ids, mode=mode))(
        *put(group, (inputs.ids,))
    )
    rows = inputs.x
    if kind == "combine":
        shape = (CASE.ranks, *plan.recv_src.shape[1:], CASE.hidden)
        rows = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    def program(watch: Watch | None) -> Any:
        def local(rows: Array, plan: Any, square: Array) -> Any:
            rank, like = jax.lax.axis_index("ep"), jax.ShapeDtypeStruct((), jnp.float32)
            if watch is not None:
                rows = jax.lax.cond(
                    rank == 1, lambda a: a + jax.pure_callback(watch.hold, like), lambda a: a, rows
                )
            results = exchange(kind, group, rows, plan)
            for step in range(STEPS):
                square = square @ square
                if watch is not None:
                    number = np.int32(step)
                    square += jax.pure_callback(watch.note, like, rank, number, square[0, 0])
            return results[:2], square, results[2:]

        return per_rank(group, local, check_vma=False)

    squares = np.stack([np.eye(CASE.hidden, dtype=np.float32)] * CASE.ranks)
    args = put(group, (rows, plan, squares))
    expected = program(None)(*args)
    watch = Watch(group)
    got = jax.block_until_ready(program(watch)(*args))
    assert watch.steps == list(range(FIRST, STEPS)), group.report()
    jax.tree.map(assert_same_bits, got[:2], expected[:2])  # epochs are others
