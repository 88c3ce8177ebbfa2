"""What every process does in a step: its ranks' part of it, and what process 0 tells it to."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import jax_ep
from moe_serve.decoder import Decoder
from moe_serve.frames import Kind
from moe_serve.processes import Member

AGREE_LIMIT_S = 60.0  # a process that lives and does not agree within this is left out


class FailedProgramError(Exception):
    """A step failed, and not for a loss: the process ends, or all others would wait for it."""


class Ranks:
    """This process's ranks: the compiled step, the parameters and the state.

    In an elastic group the state before the last step is kept until the next one begins: a step
    that has failed on any process is repeated by all, also by those on which it ended.

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
        self._active = decoder.replicate(group.active) if self.is_elastic else None
        self._state = decoder.first_state()
        self._before = self._state
        self._num_steps = 0  # that have ended, up to _state
        self._load_read = np.uint32(0)
        self.place(decoder.first_slots())

    @property
    def is_elastic(self) -> bool:
        """Whether steps go on when a process is lost."""
        return self._group.config.elastic

    @property
    def active(self) -> np.ndarray:
        """i32[N], 1 for each rank that takes part."""
        return self._group.active if self.is_elastic else np.ones(self._group.num_ranks, np.int32)

    @property
    def num_experts(self) -> int:
        """E, of a layer."""
        return self._group.config.num_experts

    @property
    def num_slots(self) -> int:
        """P, of all ranks."""
        return self._group.experts_per_rank * self._group.num_ranks

    def run(self, rows: np.ndarray) -> dict[int, np.ndarray]:
        """One step; {rank: i32[S + 1]} of this process's ranks. If it fails, nothing has changed.

        Raises:
            FailedProgramError: it failed, and the group knows of no loss.
            RuntimeError: as Group.check, where a rank was lost.
        """
        self._before = self._state  # the memory of an older one is free from here on
        try:
            state, tokens = self._run(rows)
        except Exception as error:
            self._group.check()
            raise FailedProgramError(str(error)) from error
        self._group.check()  # what a lost rank left is not given to anybody
        self._state = state
        self._num_steps += 1
        return tokens

    def _run(self, rows: np.ndarray) -> tuple[Any, dict[int, np.ndarray]]:
        decoder = self._decoder
        state, out = decoder.step(
            self._dense,
            self._experts,
            self._placements,
            self._active,
            self._state,
            decoder.shard(rows),
        )
        parts = out.addressable_shards
        return state, {part.index[0].start or 0: np.asarray(part.data)[0] for part in parts}

    def agree(self, num_steps: int) -> None:
        """Goes on with the processes that live, as if `num_steps` steps had been run so far.

        Raises:
            Exception: as Group.agree.
        """
        mask = self._group.agree(AGREE_LIMIT_S)
        self._active = self._decoder.replicate(mask)
        if self._num_steps == num_steps + 1:  # it ended here, and failed elsewhere
            self._state, self._num_steps = self._before, num_steps
        if self._num_steps != num_steps:
            raise RuntimeError(f"has run {self._num_steps} steps, expected {num_steps}")

    def readmit(self, rank: int) -> bool:
        """Whether the process of that rank, started again, takes part from the next `agree` on.

        False: it has not asked for that yet, or has died meanwhile. Waits for nothing.
        """
        try:
            self._group.readmit(rank, 0.0)
        except TimeoutError:
            return False
        return True

    def begin_at(self, num_steps: int) -> None:
        """For a process that was started again: the others have run so many steps."""
        self._num_steps = num_steps

    def place(self, slots: np.ndarray) -> None:
        """Puts the experts where i32[layers, P] says, from the next step on. Compiles nothing."""
        self._experts, self._placements = self._decoder.place(self._host_experts, slots)

    def read_load(self) -> np.ndarray:
        """u32[layers, E]: pairs of this process's bytes that chose each expert since last time."""
        parts = self._state.load.addressable_shards
        total = sum(np.asarray(part.data)[0].view(np.uint32) for part in parts)
        load = total - self._load_read  # the counters may wrap
        self._load_read = total
        return load


def follow(ranks: Ranks, link: Member, num_layers: int) -> None:
    """The loop of every process but 0, until process 0 stops it."""
    while True:
        kind, payload = link.receive()
        words = np.frombuffer(payload, np.int32)
        if kind == Kind.STOP:
            return
        if kind == Kind.STEP:
            try:
                tokens = ranks.run(words.reshape(jax.device_count(), -1))
            except RuntimeError as error:
                if not ranks.is_elastic:
                    raise
                link.answer(Kind.FAILED, str(error).encode())
            else:
                link.answer(Kind.STEP, np.stack([tokens[rank] for rank in sorted(tokens)]))
        if kind == Kind.AGREE:
            ranks.agree(int(words[0]))
            link.answer(Kind.AGREE, words[1:])
        if kind == Kind.WELCOME:
            ranks.begin_at(int(words[0]))
            link.answer(Kind.AGREE, words[1:])
        if kind == Kind.LOAD:
            link.answer(Kind.LOAD, ranks.read_load())
        if kind == Kind.PLACE:
            ranks.place(words.reshape(num_layers, -1))
