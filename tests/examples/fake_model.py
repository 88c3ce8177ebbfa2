"""A model of one line behind the scheduler's interface: it checks its work, and needs no JAX."""

import zlib

import numpy as np
from moe_serve.work import NUM_RECENT

ENDLESS = 10  # the seed of texts that do not end by themselves


def next_byte(text: bytes, seed: int) -> int:
    """Depends on every byte before it; 0, the end, about once in forty."""
    drawn = zlib.crc32(text, seed)
    return 0 if drawn % 41 == 0 and seed != ENDLESS else 1 + drawn % 255


def completion(prompt: bytes, seed: int, max_tokens: int) -> tuple[bytes, str]:
    """What a request must get, and how it ends."""
    text = bytearray(prompt or b"\0")
    begin = len(text)
    while len(text) - begin < max_tokens:
        byte = next_byte(bytes(text), seed)
        if byte == 0:
            return bytes(text[begin:]), "stop"
        text.append(byte)
    return bytes(text[begin:]), "length"


class FakeRanks:
    """`Ranks.run`, with a string as each slot's cache."""

    def __init__(self, shape):
        self.shape = shape
        self.cache = [[bytearray() for _ in range(shape.slots)] for _ in range(shape.ranks)]
        self.failure = None

    def run(self, rows):
        if self.failure is not None:
            raise self.failure
        work = self.shape.split(rows)
        assert len(set(work.any_chunk.tolist())) == 1
        assert work.any_chunk[0] == bool(work.chunk_length.any())
        return {rank: self._run_rank(rank, work) for rank in range(self.shape.ranks)}

    def _run_rank(self, rank, work):
        tokens = np.zeros(self.shape.slots + 1, np.int32)
        before, length = NUM_RECENT - 1, int(work.chunk_length[rank])
        if length:
            slot, start = int(work.chunk_slot[rank]), int(work.chunk_start[rank])
            assert work.position[rank, slot] == -1
            cache = self.cache[rank][slot]
            del cache[start:]
            assert len(cache) == start
            chunk = work.chunk[rank]
            assert bytes(chunk[:before].tolist()) == (b"\0" * before + cache)[-before:]
            cache += bytes(chunk[before : before + length].tolist())
            tokens[-1] = next_byte(bytes(cache), int(work.seed[rank, slot]))
        for slot in np.flatnonzero(work.position[rank] >= 0):
            cache = self.cache[rank][slot]
            assert work.position[rank, slot] == len(cache)
            recent = bytes(work.recent[rank, slot].tolist())
            cache.append(recent[-1])
            assert recent == (b"\0" * before + cache)[-NUM_RECENT:]
            tokens[slot] = next_byte(bytes(cache), int(work.seed[rank, slot]))
        return tokens
