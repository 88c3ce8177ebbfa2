"""The loop around the decoder's step: process 0 schedules, all processes run the same steps."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jax_ep
from moe_serve.decoder import Decoder
from moe_serve.processes import IDLE_S, Hub, Kind, Member
from moe_serve.scheduler import Request, Scheduler
from moe_serve.work import Shape


class QueueFullError(Exception):
    """More requests wait than the server takes."""


class ClosedError(Exception):
    """The server takes no more requests; says why."""


class Ranks:
    """This process's ranks: the compiled step, the parameters and the state.

    Args:
        decoder: of the whole mesh.
        group: that its experts exchange through.
        dense: replicated parameters, NumPy.
        experts: all experts' parameters, NumPy [E, ...]: a process keeps them, so that it can place
            them anew without asking another one.
    """

    def __init__(self, decoder: Decoder, group: jax_ep.Group, dense: Any, experts: Any) -> None:
        self._decoder, self._group, self._host_experts = decoder, group, experts
        self._dense = decoder.replicate(dense)
        self._state = decoder.first_state()
        self._load_read = np.uint32(0)
        self.place(decoder.first_slots())

    def run(self, rows: np.ndarray) -> dict[int, np.ndarray]:
        """One step; {rank: i32[S + 1]} of this process's ranks.

        Raises:
            Exception: as Group.check, where a rank was lost.
        """
        decoder = self._decoder
        self._state, out = decoder.step(
            self._dense, self._experts, self._placements, self._state, decoder.shard(rows)
        )
        parts = out.addressable_shards
        tokens = {part.index[0].start or 0: np.asarray(part.data)[0] for part in parts}
        self._group.check()  # what a lost rank left is not given to anybody
        return tokens

    def place(self, slots: np.ndarray) -> None:
        """Puts the experts where i32[layers, P] says, from the next step on. Compiles nothing."""
        self._experts, self._placements = self._decoder.place(self._host_experts, slots)

    def read_load(self) -> np.ndarray:
        """i32[layers, E]: pairs of this process's bytes that chose each expert since last time."""
        parts = self._state.load.addressable_shards
        total = sum(np.asarray(part.data)[0].view(np.uint32) for part in parts)
        load = total - self._load_read  # the counters may wrap
        self._load_read = total
        return load.view(np.int32)


@dataclasses.dataclass
class Counters:
    """What the loop has done; seconds are process 0's."""

    steps: int = 0
    tokens: int = 0
    step_s: float = 0.0  # whole steps, from the scheduler to the last answer
    run_s: float = 0.0  # of them: the compiled step on process 0's ranks
    exchange_s: float = 0.0  # of them: telling the others, and waiting for them afterwards
    placements: int = 0  # how often the experts were placed anew
    place_s: float = 0.0  # that it took, between steps

    def sentence(self) -> str:
        """What a server says at its end."""
        per_step = 1e3 / max(1, self.steps)
        return (
            f"{self.tokens} tokens in {self.steps} steps of {self.step_s * per_step:.2f} ms, of "
            f"which {self.exchange_s * per_step:.2f} ms to tell the other processes and to wait "
            f"for their answers; experts were placed {self.placements} times"
        )


def follow(ranks: Ranks, link: Member, num_layers: int) -> None:
    """The loop of every process but 0, until process 0 stops it."""
    while True:
        kind, payload = link.receive()
        if kind == Kind.STOP:
            return
        if kind == Kind.STEP:
            rows = np.frombuffer(payload, np.int32)
            tokens = ranks.run(rows.reshape(jax.device_count(), -1))
            link.answer(np.concatenate([tokens[rank] for rank in sorted(tokens)]))
        if kind == Kind.LOAD:
            link.answer(ranks.read_load())
        if kind == Kind.PLACE:
            slots = np.frombuffer(payload, np.int32)
            ranks.place(slots.reshape(num_layers, -1))


@dataclasses.dataclass(frozen=True)
class Balancer:
    """When the experts are placed anew, and where.

    Args:
        every: steps.
        place: i32[layers, P], the expert in each slot, of the load i32[layers, E] of these steps.
    """

    every: int
    place: Callable[[np.ndarray], np.ndarray]


class Engine:
    """Process 0's loop, in a thread of its own; the other methods may be called from any thread.

    Args:
        ranks: of this process.
        shape: of the steps.
        hub: to the other processes.
        max_waiting: requests that may wait for a slot.
        balancer: that places the experts by their load; None: they stay.
    """

    def __init__(
        self,
        ranks: Ranks,
        shape: Shape,
        hub: Hub,
        max_waiting: int,
        balancer: Balancer | None = None,
    ) -> None:
        self._balancer = balancer
        self._ranks, self._hub, self._max_waiting = ranks, hub, max_waiting
        self._scheduler = Scheduler(shape)
        self._changed = threading.Condition()
        self._is_draining = False
        self.failure: Exception | None = None
        self.counters = Counters()
        self._ranks_of: dict[int, list[int]] = {}
        for rank, device in enumerate(jax.devices()):
            self._ranks_of.setdefault(device.process_index, []).append(rank)
        self._step(shape.empty()[0])  # compiles; no request waits for that
        self.counters = Counters()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            QueueFullError: max_waiting requests wait already.
            ClosedError: the server drains, or has failed.
        """
        with self._changed:
            if self.failure is not None:
                raise ClosedError(f"the server has failed: {self.failure}")
            if self._is_draining:
                raise ClosedError("the server is shutting down")
            if len(self._scheduler.queue) >= self._max_waiting:
                raise QueueFullError(f"{self._max_waiting} requests wait already; try again later")
            self._scheduler.add(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Forgets a request; nothing if it has ended."""
        with self._changed:
            self._scheduler.cancel(request)

    def occupancy(self) -> tuple[int, int]:
        """(requests that have a slot, requests that wait)."""
        with self._changed:
            return self._scheduler.num_running, len(self._scheduler.queue)

    def drain(self, limit_s: float) -> None:
        """Takes no more requests, ends when those that it has are done, or after `limit_s`."""
        with self._changed:
            self._is_draining = True
            self._changed.notify()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            with self._changed:
                for request in self._scheduler.requests():
                    self._scheduler.cancel(request)
                    request.deliver(ClosedError("the server is shutting down"))
            self._thread.join()  # a step is bounded

    def _loop(self) -> None:
        try:
            while True:
                with self._changed:
                    rows = self._scheduler.next_step()
                    if rows is None:
                        if self._is_draining:
                            self._hub.send(Kind.STOP)
                            return
                        self._changed.wait(IDLE_S)
                if rows is None:
                    self._hub.send(Kind.IDLE)
                else:
                    self._step(rows)
                    if self._balancer and self.counters.steps % self._balancer.every == 0:
                        self._balance(self._balancer)
        except Exception as error:  # a lost rank or process: whoever waits is told
            with self._changed:
                self.failure = error
                for request in self._scheduler.requests():
                    request.deliver(ClosedError(f"the server has failed: {error}"))

    def _balance(self, balancer: Balancer) -> None:
        """Between two steps, on all processes, as frames come in order."""
        begin = time.perf_counter()
        self._hub.send(Kind.LOAD)
        load = self._ranks.read_load()
        for words in self._hub.collect().values():
            load = load + words.reshape(load.shape)
        slots = np.ascontiguousarray(balancer.place(load), np.int32)
        self._hub.send(Kind.PLACE, slots.tobytes())
        self._ranks.place(slots)
        self.counters.placements += 1
        self.counters.place_s += time.perf_counter() - begin

    def _step(self, rows: np.ndarray) -> None:
        counters, begin = self.counters, time.perf_counter()
        self._hub.send(Kind.STEP, rows.tobytes())
        sent = time.perf_counter()
        tokens = self._ranks.run(rows)
        ran = time.perf_counter()
        for process, words in self._hub.collect().items():
            parts = words.reshape(len(self._ranks_of[process]), -1)
            tokens |= dict(zip(self._ranks_of[process], parts, strict=True))
        collected = time.perf_counter()
        with self._changed:
            counters.tokens += self._scheduler.accept(tokens)
        counters.steps += 1
        counters.run_s += ran - sent
        counters.exchange_s += sent - begin + collected - ran
        counters.step_s += time.perf_counter() - begin
