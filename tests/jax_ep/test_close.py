"""The end of a group in one process: what was enqueued ends well, and everything is given back."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

TOKENS = 256
HIDDEN = 16


def _group(ranks: int, **changes: Any) -> jax_ep.Group:
    config = jax_ep.Config(
        num_experts=2 * ranks,
        top_k=2,
        hidden=HIDDEN,
        max_tokens=TOKENS,
        dtype=jnp.float32,
        timeout_s=60.0,
        **changes,
    )
    return jax_ep.create_group(Mesh(np.array(jax.devices()[:ranks]), ("ep",)), "ep", config)


def _compiled(group: jax_ep.Group) -> tuple[Callable[[Any], Any], Any]:
    """A step that returns 2 x, and its input; compiled, so that a call of it only enqueues."""

    def step(x: jax.Array) -> jax.Array:
        ids = jnp.tile(jnp.arange(2, dtype=jnp.int32), (x.shape[0], 1))
        recv = jax_ep.dispatch(group, x, ids)
        return jax_ep.combine(group, recv.x, recv)

    spec = P("ep")
    x = jax.device_put(
        np.ones((group.num_ranks * TOKENS, HIDDEN), np.float32), NamedSharding(group.mesh, spec)
    )
    run = jax.shard_map(step, mesh=group.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(run).lower(x).compile(), x


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_that_was_only_enqueued_ends_well(ranks: int) -> None:
    for _ in range(3):
        with _group(ranks) as group:
            step, x = _compiled(group)
            results = [step(x) for _ in range(5)]
            step(x)  # nobody keeps this result
        for y in results:
            np.testing.assert_array_equal(y, 2 * np.asarray(x))
        assert "is closed" in group.health().message, group.health()  # and no failure
        assert group.stats()["combines"] == 6 * ranks


@pytest.mark.parametrize("context", ["mesh", "transfer guard", "trace", "no jit"])
def test_the_context_of_the_caller_does_not_matter(context: str) -> None:
    """Each size of a group is new here: its empty program (drain.py) is compiled once only."""
    ranks = {"mesh": 3, "transfer guard": 5, "trace": 6, "no jit": 7}[context]
    if len(jax.devices()) < ranks:
        pytest.skip(f"needs {ranks} devices")
    other = jax.make_mesh((2,), ("other",), devices=jax.devices()[:2])

    def make_and_close() -> None:
        with _group(ranks):
            pass

    if context == "mesh":
        with jax.set_mesh(other):
            make_and_close()
    elif context == "transfer guard":
        with jax.transfer_guard("disallow_explicit"):
            make_and_close()
    elif context == "no jit":
        with jax.disable_jit():
            make_and_close()
    else:
        jax.eval_shape(lambda x: (make_and_close(), x)[1], 1.0)


def test_close_drains_under_another_mesh() -> None:
    group = _group(2)
    step, x = _compiled(group)
    other = jax.make_mesh((4,), ("other",), devices=jax.devices()[:4])
    with jax.set_mesh(other), jax.transfer_guard("disallow_explicit"):
        results = [step(x) for _ in range(5)]
        group.close()
    for y in results:
        np.testing.assert_array_equal(y, 2 * np.asarray(x))


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_who_closes_second_cuts_nothing_off() -> None:
    """A signal handler and the program, say."""
    for _ in range(3):
        group = _group(4)
        step, x = _compiled(group)
        results = [step(x) for _ in range(20)]
        closers = [threading.Thread(target=group.close) for _ in range(2)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        for y in results:
            np.testing.assert_array_equal(y, 2 * np.asarray(x))


def test_a_group_that_is_dropped_says_so() -> None:
    group = _group(2)
    handle = group._handle
    with pytest.warns(ResourceWarning, match="dropped, not closed"):
        del group
        gc.collect()
    handle.close()


def test_a_closed_group_holds_nothing_and_answers() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("threads of other backends come and go")
    for _ in range(2):  # XLA starts threads of its own at the first
        before = _num_threads()
        group = _group(4, node_size=1, transport="loopback")
        step, x = _compiled(group)
        step(x).block_until_ready()
        assert group.heap_bytes > 0
        assert _num_threads() > before
        group.close()
    limit = time.monotonic() + 10.0  # the kernel lists a thread a moment longer than join() waits
    while _num_threads() > before and time.monotonic() < limit:
        time.sleep(0.01)
    assert _num_threads() <= before
    assert group.heap_bytes == 0
    assert "closed" in group.dump_state()
    assert "is closed" in group.health().message
    assert group.stats()["plans"] == 4
    assert group.stats()["flows"]
    with pytest.raises(RuntimeError, match="is closed; create a new one"):
        group.check()
    group.close()


def test_a_group_may_be_looked_at_while_it_closes() -> None:
    looked = threading.Barrier(3)
    groups: list[jax_ep.Group] = []
    done = threading.Event()
    errors: list[BaseException] = []

    def look() -> None:
        try:
            looked.wait(60)
            while not done.is_set():
                for group in list(groups):
                    assert "Group(" in group.dump_state()
                    group.stats()
                    group.health()
        except BaseException as error:
            errors.append(error)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        looked.wait(60)
        for _ in range(5):
            groups[:] = [_group(4, node_size=1, transport="loopback")]
            closers = [threading.Thread(target=groups[0].close) for _ in range(2)]
            for closer in closers:
                closer.start()
            for closer in closers:
                closer.join()
            assert groups[0].heap_bytes == 0  # whichever thread closed it
    finally:
        done.set()
        for looker in lookers:
            looker.join()
    assert not errors
