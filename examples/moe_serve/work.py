"""What one step of the decoder does, as one i32 row per rank: the step's only input that changes.

Process 0 fills the rows, every process gets all of them, and the compiled step takes them apart.
The shapes never change, so nothing recompiles while requests come and go.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

NUM_RECENT = 3  # bytes that the model's input is made of: the newest and the two before it
NO_REQUEST = -1


class Work(NamedTuple):
    """One rank's part of a step; on the host every array leads with the rank.

    A slot whose `position` is -1 decodes nothing: its token goes to no expert.  At most one request
    of a rank gets a chunk of its prompt prefilled in a step, the one in `chunk_slot`.
    """

    recent: Any  # i32[S, 3], each slot's newest bytes, the newest last; 0 before the beginning
    position: Any  # i32[S], of the newest byte, or -1: the slot has no request that decodes
    seed: Any  # i32[S], of the slot's request, also while it is prefilled
    temperature: Any  # f32[S]; 0 takes the likeliest byte
    chunk: Any  # i32[2 + C], bytes of a prompt with the two before them; 0 where there are none
    chunk_slot: Any  # i32[]
    chunk_start: Any  # i32[], position of the chunk's first byte
    chunk_length: Any  # i32[], 0: this rank prefills nothing
    any_chunk: Any  # i32[], 1 if any rank prefills: equal on all ranks


@dataclasses.dataclass(frozen=True)
class Shape:
    """What fixes the shapes: ranks, slots of a rank, bytes of a chunk."""

    ranks: int
    slots: int
    chunk: int

    def _fields(self) -> list[tuple[str, tuple[int, ...]]]:
        slots, before = (self.slots,), NUM_RECENT - 1
        sizes: dict[str, tuple[int, ...]] = dict.fromkeys(Work._fields, ())
        sizes |= {"recent": (self.slots, NUM_RECENT), "chunk": (before + self.chunk,)}
        sizes |= {"position": slots, "seed": slots, "temperature": slots}
        return list(sizes.items())

    @property
    def words(self) -> int:
        """Words of a rank's row."""
        return sum(int(np.prod(shape)) for _, shape in self._fields())

    def split(self, rows: Any) -> Work:
        """The fields of i32[..., words], as views in NumPy; also inside jit.

        `temperature` stays i32: its bits are a float32's.
        """
        parts, begin = {}, 0
        for name, shape in self._fields():
            end = begin + int(np.prod(shape))
            parts[name] = rows[..., begin:end].reshape(*rows.shape[:-1], *shape)
            begin = end
        return Work(**parts)

    def empty(self) -> tuple[np.ndarray, Work]:
        """i32[ranks, words] of a step that does nothing, and its fields to fill in place."""
        rows = np.zeros((self.ranks, self.words), np.int32)
        work = self.split(rows)
        work.position[:] = NO_REQUEST
        return rows, work._replace(temperature=work.temperature.view(np.float32))
