"""The loop around the decoder's step: process 0 schedules, all processes run the same steps."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable

import jax
import numpy as np

from moe_serve.frames import Kind, LostProcessError
from moe_serve.placing import num_missing
from moe_serve.processes import IDLE_S, Hub
from moe_serve.ranks import Ranks
from moe_serve.scheduler import Request, Scheduler
from moe_serve.work import Shape

SOON_S = 0.02  # to look again after a process that is on its way back
MOST_TRIES = 3  # to repeat a step while nobody is lost: the fourth failure is no loss


class QueueFullError(Exception):
    """More requests wait than the server takes."""


class ClosedError(Exception):
    """The server takes no more requests; says why."""


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
    lost_processes: int = 0
    moved_requests: int = 0  # from ranks of lost processes to others
    returned_processes: int = 0  # that were started again
    agree_s: float = 0.0  # in all agreements on who goes on

    def sentence(self) -> str:
        """What a server says at its end."""
        per_step = 1e3 / max(1, self.steps)
        lost = (
            f"; processes lost: {self.lost_processes}, requests moved: {self.moved_requests}, "
            f"processes that came back: {self.returned_processes}, "
            f"time to agree on who goes on: {self.agree_s:.2f} s"
        )
        return (
            f"{self.tokens} tokens in {self.steps} steps of {self.step_s * per_step:.2f} ms, of "
            f"which {self.exchange_s * per_step:.2f} ms to tell the other processes and to wait "
            f"for their answers; experts were placed {self.placements} times"
            f"{lost if self.lost_processes else ''}"
        )


@dataclasses.dataclass(frozen=True)
class Balancer:
    """When the experts are placed anew, and where.

    Args:
        every: steps; 0: only after a process was lost.
        place: i32[layers, P], the expert in each slot, of the load i64[layers, E] and the ranks
            that take part, i32[N]. What was chosen before the last time counts half, before that
            a quarter, and so on.
    """

    every: int
    place: Callable[[np.ndarray, np.ndarray], np.ndarray]


class Engine:
    """Process 0's loop, in a thread of its own; the other methods may be called from any thread.

    Args:
        ranks: of this process.
        shape: of the steps.
        hub: to the other processes.
        max_waiting: requests that may wait for a slot.
        balancer: that places the experts by their load; None: they stay. Elastic ranks need one.
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
        self._all_ranks: dict[int, list[int]] = {}
        for rank, device in enumerate(jax.devices()):
            self._all_ranks.setdefault(device.process_index, []).append(rank)
        self._ranks_of = dict(self._all_ranks)  # of the processes that take part
        self._num_steps = 0  # that all processes have ended
        self._num_failures = 0  # since then, or since a process was lost
        self._num_agreements = 0  # asked for
        self._has_newcomer = False  # that was started again, and has run no step
        # i64[layers, E], how often each expert was chosen; half of it from one placing to the next.
        self._load = np.zeros((), np.int64)
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
            while self._turn():
                pass
        except Exception as error:  # a lost rank or process: whoever waits is told
            with self._changed:
                self.failure = error
                for request in self._scheduler.requests():
                    request.deliver(ClosedError(f"the server has failed: {error}"))

    def _turn(self) -> bool:
        """A step, or a while without one; False: no more are wanted.

        Where a process is lost, the others agree and the step is left out. The next one does the
        same, as a step follows from what was accepted.
        """
        try:
            is_awaited = self._ranks.is_elastic and self._take_back()
            with self._changed:
                rows = self._scheduler.next_step()
                if rows is None and self._has_newcomer:  # it compiles while no request waits
                    rows, _ = self._scheduler.shape.empty()
                is_over = rows is None and self._is_draining
                if rows is None and not is_over:
                    self._changed.wait(SOON_S if is_awaited else IDLE_S)
            if is_over:
                self._stop()
                return False
            if rows is None:
                self._hub.send(Kind.IDLE)
                return True
            self._step(rows)
            self._has_newcomer = False
            every = self._balancer.every if self._balancer else 0
            if every and self.counters.steps % every == 0:
                self._balance()
        except RuntimeError as error:  # a process is lost, as Ranks and Hub say
            if not self._ranks.is_elastic:
                raise
            self._go_on_after(error)
        return True

    def _stop(self) -> None:
        try:
            self._hub.send(Kind.STOP)
        except LostProcessError:
            if not self._ranks.is_elastic:
                raise

    def _take_back(self) -> bool:
        """Takes back processes that were started again; whether one is on its way.

        Raises:
            LostProcessError: one of them is thought to take part: it has ended unnoticed.
        """
        waiting = self._hub.waiting()
        if unnoticed := [process for process in waiting if process in self._ranks_of]:
            self._hub.forget(unnoticed)
            raise LostProcessError(f"process {unnoticed[0]} is lost: it was started again")
        ready = [p for p in waiting if self._ranks.readmit(self._all_ranks[p][0])]
        if ready:
            self._go_on_after(None)
        return len(ready) < len(waiting)

    def _go_on_after(self, trouble: Exception | None) -> None:
        """Has all processes agree on who goes on; then none knows of a step that has failed.

        Args:
            trouble: for which somebody may be lost; None: somebody comes back.
        """
        while True:
            if trouble is not None:
                if self._num_failures == MOST_TRIES:
                    raise trouble
                self._num_failures += 1
            self._num_agreements += 1
            words = np.array([self._num_steps, self._num_agreements], np.int32)
            begin = time.perf_counter()
            with contextlib.suppress(LostProcessError):
                self._hub.send(Kind.AGREE, words.tobytes())
            self._ranks.agree(self._num_steps)
            seconds = time.perf_counter() - begin
            self._leave_out_lost(trouble, seconds)
            try:
                self._welcome(words, seconds)
                self._hub.collect(Kind.AGREE, self._num_agreements)
                self._balance()
                return
            except RuntimeError as error:  # one more
                trouble = error

    def _welcome(self, words: np.ndarray, seconds: float) -> None:
        """Has those begin that all have agreed to take back, behind the frame AGREE of `words`."""
        active = self._ranks.active
        back = {
            process: ranks
            for process, ranks in self._all_ranks.items()
            if process not in self._ranks_of and active[ranks].all()
        }
        for process, ranks in back.items():
            self._ranks_of[process] = ranks
            self._has_newcomer = True
            self._hub.take(process)
            with self._changed:
                self._scheduler.regain(ranks)
            self.counters.returned_processes += 1
            print(
                f"process {process} (ranks {ranks}) is back: {active.sum()} of {active.size} ranks "
                f"go on, agreed after {seconds:.2f} s",
                flush=True,
            )
            self._hub.tell(process, Kind.WELCOME, words.tobytes())

    def _leave_out_lost(self, trouble: Exception | None, seconds: float) -> None:
        """Gives the requests of ranks that take part no more to others, and says so."""
        counters, active = self.counters, self._ranks.active
        counters.agree_s += seconds
        lost = {p: ranks for p, ranks in self._ranks_of.items() if not active[ranks].all()}
        for process in lost:
            del self._ranks_of[process]
        self._hub.forget(lost)
        with self._changed:
            moved = self._scheduler.lose([rank for ranks in lost.values() for rank in ranks])
        counters.lost_processes += len(lost)
        counters.moved_requests += moved
        if not lost and trouble is None:
            return
        if not lost:
            print(f"a step is repeated, nobody is lost: {trouble}", flush=True)
            return
        self._num_failures = 0
        names = ", ".join(f"{process} (ranks {ranks})" for process, ranks in lost.items())
        missing = num_missing(self._ranks.num_experts, self._ranks.num_slots, active)
        print(
            f"lost process {names}: {active.sum()} of {active.size} ranks go on, agreed after "
            f"{seconds:.2f} s; {moved} requests move to them, {missing} experts of each layer are "
            f"missing",
            flush=True,
        )

    def _balance(self) -> None:
        """Between two steps, on all processes, as frames come in order."""
        assert self._balancer is not None
        begin = time.perf_counter()
        self._hub.send(Kind.LOAD)
        self._load = self._load + self._ranks.read_load()
        for words in self._hub.collect(Kind.LOAD).values():
            self._load = self._load + words.view(np.uint32).reshape(self._load.shape)
        slots = np.ascontiguousarray(self._balancer.place(self._load, self._ranks.active), np.int32)
        self._hub.send(Kind.PLACE, slots.tobytes())
        self._ranks.place(slots)
        self._load = self._load // 2
        self.counters.placements += 1
        self.counters.place_s += time.perf_counter() - begin

    def _step(self, rows: np.ndarray) -> None:
        counters, begin = self.counters, time.perf_counter()
        self._hub.send(Kind.STEP, rows.tobytes())
        sent = time.perf_counter()
        tokens = self._ranks.run(rows)
        ran = time.perf_counter()
        for process, words in self._hub.collect(Kind.STEP).items():
            parts = words.reshape(len(self._ranks_of[process]), -1)
            tokens |= dict(zip(self._ranks_of[process], parts, strict=True))
        collected = time.perf_counter()
        with self._changed:
            counters.tokens += self._scheduler.accept(tokens)
        self._num_steps += 1
        self._num_failures = 0
        counters.steps += 1
        counters.run_s += ran - sent
        counters.exchange_s += sent - begin + collected - ran
        counters.step_s += time.perf_counter() - begin
