"""The text: the Python standard library's own sources as bytes, split by file, and its bigrams.

Everything here follows from the installed files and a seed; nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import sysconfig
import zlib
from pathlib import Path

import numpy as np

NUM_BYTES = 256
HELD_OUT_ONE_IN = 16  # files
PROMPTS = (b"def ", b"import ", b"class ", b"    return ")
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Two byte strings that share no file."""

    train: np.ndarray
    held_out: np.ndarray
    num_files: int


def load_standard_library() -> Corpus:
    """Reads every .py file of the standard library (without its tests), in the order of names."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name in names:
        is_held_out = zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0
        parts[is_held_out].append((root / name).read_bytes() + b"\0")
    train, held_out = (np.frombuffer(b"".join(parts[key]), np.uint8) for key in (False, True))
    if min(train.size, held_out.size) < 1 << 16:
        raise SystemExit(f"{root} holds only {len(names)} .py files: too little text to train on")
    return Corpus(train, held_out, len(names))


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """i32[len(starts), length + 1]: each row is the input and, shifted by one, the target."""
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def training_batch(corpus: Corpus, seed: int, step: int, batch: int, length: int) -> np.ndarray:
    """The global batch of a step; it depends on seed and step alone, so that runs can resume."""
    rng = np.random.default_rng((seed, step))
    return windows(corpus.train, rng.integers(0, corpus.train.size - length, batch), length)


def held_out_windows(corpus: Corpus, count: int, length: int) -> np.ndarray:
    """Evenly spaced windows of the held-out text, the same for every run."""
    return windows(
        corpus.held_out,
        np.linspace(0, corpus.held_out.size - length - 1, count).astype(np.int64),
        length,
    )


def prompts(count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """i32[count, length] with beginnings of code, zeros behind them, and their lengths."""
    tokens, lengths = np.zeros((count, length), np.int32), np.zeros(count, np.int32)
    for row in range(count):
        text = np.frombuffer(PROMPTS[row % len(PROMPTS)], np.uint8)[:length]
        tokens[row, : text.size], lengths[row] = text, text.size
    return tokens, lengths


def readable(text: np.ndarray) -> str:
    """Bytes as text, up to the end of the file that they are from; no codes for a terminal."""
    decoded = text.astype(np.uint8).tobytes().partition(b"\0")[0].decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in decoded).rstrip()


def bigram_loss(corpus: Corpus, evaluated: np.ndarray) -> float:
    """Cross entropy in nats/byte of an add-one bigram model on the targets of ``evaluated``."""
    pairs = corpus.train[:-1].astype(np.int64) * NUM_BYTES + corpus.train[1:]
    counts = np.bincount(pairs, minlength=NUM_BYTES**2).reshape(NUM_BYTES, NUM_BYTES) + 1.0
    log_probability = np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(-log_probability[evaluated[:, :-1], evaluated[:, 1:]].mean())
