"""``python -m jax_ep bench --report DIR``: measures the declared cases and writes a page.

Each case is a job of its own (``bench_report_worker.py``). A method that ends the job, or does not
end in time, is left out, and the case starts again without it: the other results are not lost.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jax_ep._cli import bench_report_machine
from jax_ep._cli.bench import BenchOptions, check
from jax_ep._cli.bench_report_cases import OURS, cases_for
from jax_ep._cli.bench_report_page import page
from jax_ep._cli.extras import make_console, require
from jax_ep._cli.shapes import SHAPES

PROBE_LIMIT_S = 120.0
CASE_LIMIT_S = 300.0  # far above the half minute that a case takes on two idle cores
CPU_RANKS = 4  # as many processes, as the README's training job has
TAIL_LINES = 8
_DEVICE_FLAG = "--xla_force_host_platform_device_count"
_PROBE = "import jax; print('FOUND', jax.default_backend(), jax.device_count())"


def bench_report(options: BenchOptions, shape: str | None) -> int:
    """Writes DIR/index.html and DIR/results.json.

    ``shape`` None measures the declared cases; num_ranks 0 and num_processes 0 mean 4 CPU processes
    or the GPUs present. Returns 0 if jax_ep was measured in every case, 2 for options that do not
    fit, else 1: then the page says what went wrong.
    """
    console = make_console()
    require("matplotlib")  # before the time is spent
    folder = Path(options.out_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        platform, num_ranks, num_processes = _place(options)
        cases = cases_for(platform, shape, options.mode)
        for case in cases:
            check(options, num_ranks, num_processes, case.shape)
    except (ValueError, RuntimeError, OSError) as error:
        console.print(f"bench --report: {error}", style="red", markup=False)
        return 2
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(options, shape),
        "commit": bench_report_machine.commit() or None,
        "machine": bench_report_machine.machine(),
        "versions": bench_report_machine.package_versions(),
        "repeats": options.repeats,
        "cases": [],
    }
    for number, case in enumerate(cases, 1):
        console.print(f"{number} of {len(cases)}: {case.name}", markup=False)
        settings = {
            "shape": case.shape,
            "mode": case.mode,
            "num_ranks": num_ranks,
            "node_size": options.node_size,
            "transport": options.transport,
            "repeats": options.repeats,
        }
        measured = _measure(settings, num_processes, 1 if platform != "cpu" else num_ranks)
        record["cases"].append({"name": case.name, "mode": case.mode, **measured})
        # After each case: what has been measured stays, if the rest is interrupted.
        (folder / "results.json").write_text(json.dumps(record, indent=1) + "\n")
        (folder / "index.html").write_text(page(record), encoding="utf-8")
        for missing in measured["missing"]:
            console.print(f"  without {missing['method']}: {missing['reason']}", markup=False)
    console.print(f"{folder / 'index.html'} and results.json were written", markup=False)
    failed = [c["name"] for c in record["cases"] if any(m["method"] == OURS for m in c["missing"])]
    if failed:
        console.print(f"jax_ep could not be measured in: {'; '.join(failed)}", style="red")
    return 1 if failed else 0


def _command(options: BenchOptions, shape: str | None) -> str:
    """What repeats this report."""
    words = ["python -m jax_ep bench --report DIR"]
    chosen = {
        "--shape": shape,
        "--mode": options.mode if options.mode != "auto" else None,
        "--ranks": options.num_ranks or None,
        "--processes": options.num_processes or None,
        "--node-size": options.node_size,
        "--transport": options.transport if options.transport != "auto" else None,
        "--repeats": options.repeats,
    }
    words += [f"{name} {value}" for name, value in chosen.items() if value is not None]
    return " ".join(words)


def _place(options: BenchOptions) -> tuple[str, int, int]:
    """The platform that JAX takes here, and how many ranks in how many processes.

    Raises:
        RuntimeError: JAX has no devices.
        ValueError: ranks and processes do not fit it.
    """
    # In a process of its own: this one must not take the GPUs' memory.
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"JAX found no devices within {PROBE_LIMIT_S:g} s") from None
    found = [line.split() for line in done.stdout.splitlines() if line.startswith("FOUND")]
    if not found:
        raise RuntimeError("JAX found no devices: " + _tail(done.stderr))
    platform, count = found[0][1], int(found[0][2])
    if platform == "cpu":
        ranks = options.num_ranks or options.num_processes or CPU_RANKS
        processes = options.num_processes or ranks
    else:
        ranks, processes = options.num_ranks or count, options.num_processes or 1
        if ranks > count or processes != 1:
            raise ValueError(
                f"got --ranks {ranks} and --processes {processes}, expected one process and at "
                f"most the {count} devices of this host"
            )
    return platform, ranks, processes


def _measure(settings: dict[str, Any], num_processes: int, devices: int) -> dict[str, Any]:
    """One case's record; starts the job again without each method that ended it."""
    missing: dict[str, str] = {}
    while True:
        record, culprit, reason = _job({**settings, "missing": missing}, num_processes, devices)
        if record is not None:
            return record
        if not culprit or culprit in missing:
            # Not while a method was prepared: then no method is known to be the cause.
            missing = {OURS: reason}
            break
        missing[culprit] = reason
    shape = SHAPES[settings["shape"]]
    return {
        "shape": {**vars(shape)},
        "ranks": settings["num_ranks"],
        "processes": num_processes,
        "results": [],
        "missing": [{"method": name, "reason": why} for name, why in missing.items()],
    }


def _job(
    settings: dict[str, Any], num_processes: int, devices: int
) -> tuple[dict[str, Any] | None, str, str]:
    """The case's record, or None with the method that ended the job and how."""
    with tempfile.TemporaryDirectory(prefix="jax_ep_report_") as scratch:
        path, progress = Path(scratch) / "case.json", Path(scratch) / "progress"
        worker = Path(__file__).with_name("bench_report_worker.py")
        command = [sys.executable, "-m", "jax_ep", "launch", "-n", str(num_processes)]
        command += ["-D", str(max(1, devices // num_processes)), "--grace", "5", str(worker)]
        command += [json.dumps(settings), str(path), str(progress)]
        env = dict(os.environ)
        # The number of CPU devices is this command's to say.
        env.pop("JAX_NUM_CPU_DEVICES", None)
        flags = env.get("XLA_FLAGS", "").split()
        env["XLA_FLAGS"] = " ".join(f for f in flags if not f.startswith(_DEVICE_FLAG))
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=CASE_LIMIT_S
            )
            reason = f"exit code {done.returncode}: {_tail(done.stderr or done.stdout)}"
        except subprocess.TimeoutExpired:
            reason = f"no end within {CASE_LIMIT_S:g} s"
        if path.exists():
            record: dict[str, Any] = json.loads(path.read_text())
            return record, "", ""
        return None, progress.read_text() if progress.exists() else "", reason


def _tail(text: str) -> str:
    return " / ".join(line.strip() for line in text.strip().splitlines()[-TAIL_LINES:])
