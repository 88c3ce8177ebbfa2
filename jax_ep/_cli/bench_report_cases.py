"""What ``bench --report`` measures: its cases and its operations."""

from __future__ import annotations

import dataclasses

OURS = "jax_ep"
# operation -> how often a payload moves in it
OPERATIONS = {"dispatch": 1, "combine": 1, "pair": 2, "pair, value and gradients": 4}

_CPU = (("ll", "decode"), ("ht", "small"), ("ht", "cpu"))
_GPU = (("ll", "deepseek-v3-decode"), ("ht", "qwen3-235b"), ("ht", "deepseek-v3"))


@dataclasses.dataclass(frozen=True)
class Case:
    """One mode of jax_ep at one named shape; ``name`` is what a reader sees."""

    mode: str
    shape: str

    @property
    def name(self) -> str:
        """Such as "ht, small"."""
        return f"{self.mode}, {self.shape}"


def cases_for(platform: str, shape: str | None, mode: str) -> list[Case]:
    """The declared cases of a platform, or both modes of one shape; ``mode`` leaves out others."""
    declared: tuple[tuple[str, str], ...] = _CPU if platform == "cpu" else _GPU
    if shape is not None:
        declared = tuple((each, shape) for each in ("ll", "ht"))
    return [Case(each, name) for each, name in declared if mode in ("auto", each)]
