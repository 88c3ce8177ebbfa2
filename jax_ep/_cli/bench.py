"""``python -m jax_ep bench``: starts the worker on fresh ranks, then prints and draws its results.

What is measured, and how, is in ``bench_worker.py``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from jax_ep._cli.extras import make_console, require
from jax_ep._cli.shapes import SHAPES
from jax_ep._launch.launcher import launch
from jax_ep._launch.options import LaunchOptions

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """What to measure, where, and how often; ``shape`` names an entry of SHAPES."""

    shape: str
    mode: str
    num_ranks: int
    num_processes: int
    node_size: int | None
    transport: str
    repeats: int
    out_dir: str


def bench(options: BenchOptions) -> int:
    """Measures one shape; writes JSON and PNG to ``out_dir`` and returns the exit code."""
    console = make_console()
    require("matplotlib")  # before the time is spent
    folder = Path(options.out_dir)
    try:
        check(options, options.num_ranks, options.num_processes, options.shape)
        folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        console.print(f"bench: {error}", style="red", markup=False)
        return 2
    path = folder / f"{options.shape}-{options.num_processes}x{_devices(options)}.json"
    path.unlink(missing_ok=True)
    worker = Path(__file__).with_name("bench_worker.py")
    exit_code = launch(
        LaunchOptions(
            num_processes=options.num_processes,
            devices_per_process=_devices(options),
            command=[str(worker), json.dumps(dataclasses.asdict(options)), str(path)],
            grace_s=5.0,
        )
    )
    if exit_code != 0:
        return exit_code
    report = json.loads(path.read_text())
    console.print(_table(report))
    picture = path.with_suffix(".png")
    _draw(report, picture)
    console.print(f"{path} and {picture} were written", markup=False)
    return 0


def check(options: BenchOptions, num_ranks: int, num_processes: int, shape: str) -> None:
    """Refuses what cannot be measured, before anything is started.

    Raises:
        ValueError: says which options do not fit each other.
    """
    if num_ranks % num_processes:
        raise ValueError(
            f"got --ranks {num_ranks} and --processes {num_processes}, expected the ranks to be a "
            "multiple of the processes"
        )
    if (experts := SHAPES[shape].num_experts) % num_ranks:
        raise ValueError(
            f"got {num_ranks} ranks, expected a divisor of the {experts} experts of {shape}"
        )
    if options.node_size is not None and num_ranks % options.node_size:
        raise ValueError(
            f"got --node-size {options.node_size}, expected a divisor of the {num_ranks} ranks"
        )


def _devices(options: BenchOptions) -> int:
    return options.num_ranks // options.num_processes


def _title(report: dict[str, Any]) -> str:
    shape = SHAPES[report["options"]["shape"]]
    options = report["options"]
    return (
        f"{options['shape']}: T={shape.tokens} H={shape.hidden} K={shape.top_k} "
        f"E={shape.num_experts} {shape.dtype}, {options['num_ranks']} ranks in "
        f"{options['num_processes']} process{'es' * (options['num_processes'] > 1)}"
    )


def _table(report: dict[str, Any]) -> Any:
    table = require("rich.table").Table(title=_title(report))
    for column in ("program", "median", "p99", "payload per rank", "round trip / ours"):
        table.add_column(column, justify="left" if column == "program" else "right")
    ours = next((r["median_us"] for r in report["results"] if r["name"] == report["ours"]), None)
    for result in report["results"]:
        rate = result["payload_bytes"] / result["median_us"] / 1e-6 / _MIB
        ratio = result["median_us"] / ours if ours and result["is_round_trip"] else math.nan
        table.add_row(
            result["name"],
            f"{result['median_us']:,.0f} us",
            f"{result['p99_us']:,.0f} us",
            f"{rate:,.0f} MiB/s",
            "" if math.isnan(ratio) else f"{ratio:.2f}",
        )
    return table


def _draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = report["results"][::-1]
    medians = [result["median_us"] / 1e3 for result in results]
    above = [
        (result["p99_us"] - result["median_us"]) / 1e3 for result in results
    ]  # p99 as a whisker
    colors = ["tab:blue" if "jax_ep" in result["name"] else "tab:gray" for result in results]
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(results) + 1.4), layout="constrained")
    names = [result["name"] for result in results]
    axes.barh(names, medians, xerr=([0] * len(above), above), color=colors, capsize=3)
    axes.set(xlabel="milliseconds per call, slowest rank (median, whisker: p99)")
    axes.set_title(_title(report), fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
