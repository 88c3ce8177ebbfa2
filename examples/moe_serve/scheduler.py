"""Continuous batching: which request has which slot, and what every slot does in the next step.

Plain Python, no JAX, no clock: a step's work follows from the requests alone.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Literal

import numpy as np

from moe_serve.work import NUM_RECENT, Shape, Work

END = 0  # the byte between two files: the model's end of text
Finish = Literal["stop", "length"]


@dataclasses.dataclass(eq=False)
class Request:
    """One completion: what was asked, and what has come of it.

    Args:
        prompt: bytes; empty means the beginning of a file.
        max_tokens: most bytes to write, at least 1.
        temperature: 0 takes the likeliest byte.
        seed: of the sampling, i32; a draw depends on it and on the position of the byte alone.
        deliver: called with each new byte, then with the reason why there are no more: how the
            request ended, or an error.
    """

    prompt: bytes
    max_tokens: int
    temperature: float
    seed: int
    deliver: Callable[[int | Finish | Exception], None]
    text: bytearray = dataclasses.field(init=False)  # the prompt, and what was written
    given: int = dataclasses.field(init=False)  # bytes of the text that are to be prefilled
    prefilled: int = 0  # of them, bytes that are in the cache
    number: int = 0  # by which the scheduler knows who came first
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        """An empty prompt becomes the byte that files begin after."""
        self.prompt = self.prompt or bytes([END])
        self.text = bytearray(self.prompt)
        self.given = len(self.text)

    def restart(self) -> None:
        """Its cache is lost: what it has written so far is prefilled with its prompt."""
        self.given, self.prefilled = len(self.text), 0

    @property
    def is_prefilled(self) -> bool:
        """Whether the next step decodes."""
        return self.prefilled == self.given

    def take(self, token: int) -> bool:
        """Takes the byte that the model wrote; whether the request has ended."""
        if token == END:
            self.deliver("stop")
            return True
        self.text.append(token)
        self.deliver(token)
        if len(self.text) - len(self.prompt) < self.max_tokens:
            return False
        self.deliver("length")
        return True


class Scheduler:
    """The queue and the slots of all ranks."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.queue: collections.deque[Request] = collections.deque()
        self._num_added = 0
        self.slots: list[list[Request | None]] = [[None] * shape.slots for _ in range(shape.ranks)]
        self._lost: set[int] = set()  # ranks that get no requests
        self._chunks: dict[int, tuple[int, int]] = {}  # rank -> (slot, bytes) of the step at hand
        self._decoding: list[tuple[int, int]] = []

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return sum(request is not None for slots in self.slots for request in slots)

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        self._num_added += 1
        request.number = self._num_added
        self.queue.append(request)

    def cancel(self, request: Request) -> None:
        """Forgets a request that nobody reads any more; the next step has its slot."""
        request.is_cancelled = True
        if request in self.queue:
            self.queue.remove(request)

    def lose(self, ranks: Collection[int]) -> int:
        """From now on these ranks get no requests; those they had wait again, first come first.

        Returns:
            How many requests were moved.
        """
        self._lost |= set(ranks)
        self._free_cancelled()
        moved = [request for rank in ranks for request in self.slots[rank] if request is not None]
        for rank in ranks:
            self.slots[rank] = [None] * self.shape.slots
        for request in moved:
            request.restart()
        self.queue = collections.deque(
            sorted([*moved, *self.queue], key=lambda request: request.number)
        )
        return len(moved)

    def regain(self, ranks: Collection[int]) -> None:
        """These ranks, which were lost, get requests again; their caches are empty."""
        self._lost -= set(ranks)

    def requests(self) -> list[Request]:
        """All that have not ended: those with a slot, then those that wait."""
        running = [request for slots in self.slots for request in slots if request is not None]
        return running + list(self.queue)

    def next_step(self) -> np.ndarray | None:
        """i32[ranks, words] (`Shape.split`), or None where nothing is to be done.

        Slots of cancelled requests become free, and waiting requests get free slots.  Then one
        request of each rank, the one that came first, gets the next chunk of its prompt prefilled;
        all that are prefilled decode one byte.
        """
        self._free_cancelled()
        self._admit()
        rows, work = self.shape.empty()
        self._chunks, self._decoding = {}, []
        for rank, slots in enumerate(self.slots):
            waiting = []
            for slot, request in enumerate(slots):
                if request is None:
                    continue
                at = (rank, slot)
                work.seed[at], work.temperature[at] = request.seed, request.temperature
                if request.is_prefilled:
                    newest = request.text[-NUM_RECENT:]
                    work.recent[at][-len(newest) :] = list(newest)
                    work.position[at] = len(request.text) - 1
                    self._decoding.append(at)
                else:
                    waiting.append((request.number, slot))
            if waiting:
                _, slot = min(waiting)
                self._fill_chunk(work, rank, slot)
        work.any_chunk[:] = bool(self._chunks)
        return rows if self._chunks or self._decoding else None

    def accept(self, tokens: Mapping[int, np.ndarray]) -> int:
        """Takes the step's bytes, i32[slots + 1] of each rank; the last is the chunk's.

        A rank that is not in `tokens` did not answer: its requests stay where they were.

        Returns:
            How many bytes were written.
        """
        written = []
        for rank, (slot, count) in self._chunks.items():
            request = self.slots[rank][slot]
            if rank in tokens and request is not None:
                request.prefilled += count
                if request.is_prefilled:
                    written.append((rank, slot, self.shape.slots))
        written += [(rank, slot, slot) for rank, slot in self._decoding if rank in tokens]
        for rank, slot, column in written:
            request = self.slots[rank][slot]
            if request is not None and request.take(int(tokens[rank][column])):
                self.slots[rank][slot] = None
        return len(written)

    def _free_cancelled(self) -> None:
        for slots in self.slots:
            for slot, request in enumerate(slots):
                if request is not None and request.is_cancelled:
                    slots[slot] = None

    def _admit(self) -> None:
        """First come, first served; on the rank that has most free slots."""
        while self.queue:
            free = [
                0 if rank in self._lost else slots.count(None)
                for rank, slots in enumerate(self.slots)
            ]
            rank = int(np.argmax(free))
            if not free[rank]:
                return
            self.slots[rank][self.slots[rank].index(None)] = self.queue.popleft()

    def _fill_chunk(self, work: Work, rank: int, slot: int) -> None:
        request = self.slots[rank][slot]
        assert request is not None
        start = request.prefilled
        count = min(self.shape.chunk, request.given - start)
        before = NUM_RECENT - 1
        first = max(0, start - before)
        given = request.text[first : start + count]
        begin = before - (start - first)
        work.chunk[rank, begin : begin + len(given)] = list(given)
        work.chunk_slot[rank], work.chunk_start[rank] = slot, start
        work.chunk_length[rank] = count
        self._chunks[rank] = (slot, count)
