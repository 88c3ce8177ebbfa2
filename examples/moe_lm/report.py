"""What a run tells: progress lines, results as JSON, two plots, and a comparison of two runs."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

COMPARED_STEPS = 20
STEP_TOLERANCE = 1e-5  # relative, f32
FINAL_TOLERANCE = 0.02  # relative


@dataclasses.dataclass
class Results:
    """Everything that is written to results.json."""

    options: dict[str, Any]
    implementation: str
    bigram_loss: float
    losses: list[float] = dataclasses.field(default_factory=list)
    held_out: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    dropped: list[int] = dataclasses.field(default_factory=list)
    load: list[list[list[int]]] = dataclasses.field(default_factory=list)  # [sample][layer][E]
    load_steps: list[int] = dataclasses.field(default_factory=list)
    tokens_per_second: float = 0.0

    def save(self, path: Path) -> None:
        """Writes the JSON file that ``--compare`` reads."""
        path.write_text(json.dumps(dataclasses.asdict(self)) + "\n")

    @classmethod
    def load_from(cls, path: Path) -> Results:
        """Reads what ``save`` wrote."""
        return cls(**json.loads(path.read_text()))


class Console:
    """Progress of process 0; the other processes say nothing."""

    def __init__(self, is_speaker: bool, steps: int) -> None:
        self._progress = None
        self._console = None
        if not is_speaker:
            return
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        self._console = RichConsole(highlight=False, soft_wrap=True)
        if self._console.is_terminal:
            self._progress = Progress(
                BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=self._console
            )
            self._task = self._progress.add_task("training", total=steps)
            self._progress.start()

    def say(self, text: str) -> None:
        """Prints one line."""
        if self._console is not None:
            self._console.print(text, markup=False)

    def advance_to(self, step: int) -> None:
        """Moves the bar, where there is one."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Takes the bar away; ``say`` still works."""
        if self._progress is not None:
            self._progress.stop()


class Meter:
    """Tokens per second since it was made or last read."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._tokens = 0

    def add(self, tokens: int) -> None:
        """Counts trained tokens."""
        self._tokens += tokens

    def read(self) -> float:
        """The rate; starts a new interval."""
        now = time.monotonic()
        rate = self._tokens / max(now - self._begin, 1e-9)
        self._begin, self._tokens = now, 0
        return rate


def draw(results: Results, folder: Path) -> None:
    """Saves loss.png and expert_load.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(results.losses, linewidth=0.8, color="tab:blue", alpha=0.6, label="training")
    if results.held_out:
        axes.plot(*zip(*results.held_out, strict=True), "o-", color="tab:orange", label="held out")
    axes.axhline(results.bigram_loss, color="tab:gray", linestyle="--", label="bigram, held out")
    axes.set(xlabel="step", ylabel="nats per byte", title="Byte-level MoE on the standard library")
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=150)
    pyplot.close(figure)
    if not results.load:
        return

    load = np.asarray(results.load, np.float64)  # [sample, layer, E]
    share = load / np.maximum(load.sum(axis=2, keepdims=True), 1) * load.shape[2]
    figure, panels = pyplot.subplots(
        load.shape[1], 1, figsize=(7, 1.6 * load.shape[1] + 0.8), layout="constrained", sharex=True
    )
    last = load.shape[2] - 0.5
    extent = (results.load_steps[0], results.load_steps[-1] + 1, last, -0.5)
    for layer, panel in enumerate(np.atleast_1d(panels)):
        image = panel.imshow(
            share[:, layer].T, aspect="auto", vmin=0, vmax=2, cmap="RdBu_r", extent=extent
        )
        panel.set(ylabel=f"layer {layer}\nexpert")
    np.atleast_1d(panels)[-1].set(xlabel="step")
    figure.colorbar(image, ax=panels, label="load / even load")
    figure.savefig(folder / "expert_load.png", dpi=150)
    pyplot.close(figure)


def compare(mine: Results, other: Results) -> tuple[bool, str]:
    """Whether two runs agree as two implementations of one model should, and a sentence on it."""
    if mine.options != other.options:
        keys = sorted(
            key
            for key in {*mine.options, *other.options}
            if mine.options.get(key) != other.options.get(key)
        )
        return False, f"the runs were made with different options: {', '.join(keys)}"
    count = min(len(mine.losses), len(other.losses), COMPARED_STEPS)
    if count == 0 or not (mine.held_out and other.held_out):
        return False, "nothing to compare: a run has no steps"
    first, second = np.array(mine.losses[:count]), np.array(other.losses[:count])
    worst = float(np.max(np.abs(first - second) / np.abs(second)))
    finals = mine.held_out[-1][1], other.held_out[-1][1]
    apart = abs(finals[0] - finals[1]) / finals[1]
    is_equal = bool(worst <= STEP_TOLERANCE and apart <= FINAL_TOLERANCE)
    return is_equal, (
        f"{mine.implementation} against {other.implementation}: first {count} losses differ by at "
        f"most {worst:.1e} (limit {STEP_TOLERANCE:.0e}), final held-out losses {finals[0]:.4f} and "
        f"{finals[1]:.4f} by {apart:.2%} (limit {FINAL_TOLERANCE:.0%})"
    )
