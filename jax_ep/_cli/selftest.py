"""``python -m jax_ep selftest``: runs the checks in fresh processes and shows one table.

The checks themselves are in ``selftest_checks.py``; here are only the two ways in which they are
started: one process with virtual devices, and two processes through ``launch``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jax_ep._cli.extras import make_console, require

LIMIT_S = 300.0  # for one part; far above the few seconds that it takes on two idle cores
ERROR_TAIL_LINES = 12


@dataclasses.dataclass(frozen=True)
class _Part:
    title: str
    num_processes: int
    devices_per_process: int


_PARTS = (
    _Part("1 process, 8 devices", num_processes=1, devices_per_process=8),
    _Part("2 processes, 1 device each", num_processes=2, devices_per_process=1),
)


def selftest(json_path: str | None = None) -> int:
    """Prints the table and returns 0 if every check passed, else 1."""
    console = make_console()
    table = require("rich.table").Table("", "check", "result", title="jax_ep selftest")
    results: list[dict[str, object]] = []
    errors: list[str] = []
    begin = time.monotonic()
    for part in _PARTS:
        part_results, error = _run(part)
        if error:
            errors.append(f"{part.title}:\n{error}")
        for result in part_results:
            results.append({"part": part.title, **result})
            mark = "[green]ok[/]" if result["ok"] else "[bold red]FAIL[/]"
            table.add_row(part.title, str(result["name"]), f"{mark} {result['detail']}")
        table.add_section()
    is_good = all(result["ok"] for result in results)
    console.print(table)
    for error in errors:
        console.print(error, style="red", markup=False)
    passed = sum(bool(result["ok"]) for result in results)
    console.print(
        f"{passed} of {len(results)} checks passed in {time.monotonic() - begin:.0f} s",
        style="green" if is_good else "red",
    )
    if json_path is not None:
        Path(json_path).write_text(json.dumps(results, indent=1) + "\n")
    return 0 if is_good else 1


def _run(part: _Part) -> tuple[list[dict[str, object]], str]:
    """Results of one part, and what went wrong around the checks (or an empty string)."""
    with tempfile.TemporaryDirectory(prefix="jax_ep_selftest_") as folder:
        path = Path(folder) / "results.jsonl"
        script = Path(__file__).with_name("selftest_checks.py")
        command = [sys.executable, "-m", "jax_ep", "launch", "-n", str(part.num_processes)]
        command += ["-D", str(part.devices_per_process), "--grace", "5", str(script), str(path)]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        # Whatever the user set for his own run must not change the number of devices.
        env.pop("XLA_FLAGS", None)
        env.pop("JAX_NUM_CPU_DEVICES", None)
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
            exit_code, stderr = done.returncode, done.stderr
        except subprocess.TimeoutExpired as error:
            exit_code = None
            stderr = (error.stderr or b"").decode(errors="replace")
        lines = path.read_text().splitlines() if path.exists() else []
    results: list[dict[str, object]] = [json.loads(line) for line in lines]
    if exit_code == 0 and results:
        return results, ""
    what = f"no end within {LIMIT_S:g} s" if exit_code is None else f"exit code {exit_code}"
    results.append({"name": "the processes of this part", "ok": False, "detail": what})
    return results, "\n".join(stderr.splitlines()[-ERROR_TAIL_LINES:])
