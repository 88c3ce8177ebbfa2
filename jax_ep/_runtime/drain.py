"""Waiting for executions that XLA:CPU has taken and not begun.

XLA has no call for that: `synchronize_all_activity` knows what runs, and results may have been
dropped. But XLA:CPU begins an execution on several devices of a process when the one before has
ended, and those on a single device in the order in which a thread enqueued them. So a program
without any work, enqueued last, ends last. On a single device other threads may have enqueued more:
their results are waited for, as far as somebody keeps them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.02


class Drain:
    """The empty program of some devices of this process; made early, for a close may be late."""

    def __init__(self, devices: Sequence[Any]) -> None:
        """Compiles it, once per process and set of devices."""
        self._devices = tuple(dict.fromkeys(devices))
        self._run = _program(self._devices)

    def run(self, give_up: Callable[[], bool]) -> bool:
        """Waits until everything that was enqueued has ended, or until `give_up` says so.

        Returns:
            Whether everything has ended.
        """
        results = []
        with contextlib.suppress(Exception):  # of executions before: their callers see it
            results = [self._run()]
        if len(self._devices) == 1:
            (device,) = self._devices
            results += [array for array in jax.live_arrays() if device in array.devices()]
        pause = _FIRST_PAUSE_S
        for result in results:
            while not _is_ready(result):
                if give_up():
                    return False
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        return True


def _is_ready(array: Any) -> bool:
    try:
        return bool(array.is_ready())
    except Exception:  # deleted or donated meanwhile
        return True


@functools.cache
def _program(devices: tuple[Any, ...]) -> Callable[[], Any]:
    # On a thread of its own: JAX's contexts belong to a thread, and the caller's (jax.set_mesh, a
    # trace, a transfer guard) is not meant for this program.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(_compiled, devices).result()


def _compiled(devices: tuple[Any, ...]) -> Callable[[], Any]:
    mesh = jax.sharding.Mesh(np.array(devices), ("devices",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
    ones = jax.device_put(np.ones(len(devices), np.int32), split)
    compiled = jax.jit(lambda x: x + 1, in_shardings=split, out_shardings=split).lower(ones)
    return functools.partial(compiled.compile(), ones)
