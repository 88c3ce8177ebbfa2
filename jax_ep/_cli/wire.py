"""``python -m jax_ep bench --wire BUILD``: put+signal between two processes, and its bounds.

``BUILD``: a CMake folder with ``-DJAX_EP_BUILD_BENCHMARKS=ON``. Ours is the whole host path (ring,
proxy thread, transport, sequencer, flag); the bounds are a raw libfabric writer with the same
provider, window and sizes, and ``fi_pingpong`` where it is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path

from jax_ep._cli.extras import make_console, require

_TIMEOUT_S = 120
_ROUNDS = 5  # ours and theirs in turn; the table shows medians
_WINDOW_MESSAGES, _WINDOW_BYTES = 256, 256 << 20
_PINGPONG_BYTES = 16  # the shortest command

Results = dict[tuple[str, str, int], list[float]]  # (program, what, bytes) -> measurements


def wire(build: str, transport: str, provider: str, address: str, out_dir: str) -> int:
    """Measures, prints a table and writes ``wire.json``; returns the exit code."""
    console = make_console()
    folder = Path(build) / "benchmarks"
    ours, raw = folder / "bench_wire", folder / "raw_ofi"
    if not ours.exists():
        console.print(
            f"bench --wire: found no {ours}; build with -DJAX_EP_BUILD_BENCHMARKS=ON", style="red"
        )
        return 2
    environment = dict(os.environ)
    if transport == "ofi":
        environment.setdefault("JAX_EP_OFI_PROVIDER", provider)
    results: Results = defaultdict(list)
    for _ in range(_ROUNDS):
        if transport == "ofi" and raw.exists():
            _take(results, [raw, provider, address, _WINDOW_MESSAGES], environment)
        _take(results, [ours, transport, _WINDOW_MESSAGES, _WINDOW_BYTES], environment)
        if transport == "ofi" and shutil.which("fi_pingpong"):
            _ping_pong(results, provider, address)
    table = require("rich.table").Table(title=f"put+signal over {transport} ({provider})")
    for column in ("what", "bytes", "program", "median", "ours / it"):
        table.add_column(column, justify="right" if column in ("bytes", "median") else "left")
    report = []
    for (program, what, size), values in sorted(results.items(), key=lambda item: item[0][1:]):
        median = statistics.median(values)
        own = statistics.median(results.get(("jax_ep", what, size), [float("nan")]))
        unit = "us" if what == "latency" else "GB/s"
        table.add_row(what, str(size), program, f"{median:.2f} {unit}", f"{own / median:.2f}")
        report.append({"what": what, "bytes": size, "program": program, "values": values})
    console.print(table)
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    path = Path(out_dir) / "wire.json"
    path.write_text(json.dumps({"transport": transport, "provider": provider, "results": report}))
    console.print(f"{path} was written", markup=False)
    return 0


def _take(results: Results, command: list[object], environment: dict[str, str]) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env=environment,
        check=True,
    )
    first = True
    for line in done.stdout.splitlines():
        words = line.split()
        if len(words) != 5 or words[1] not in ("latency", "bandwidth"):
            continue
        if not first:  # the first case only makes the connection
            results[words[0], words[1], int(words[2])].append(float(words[4]))
        first = False


def _ping_pong(results: Results, provider: str, address: str) -> None:
    """fi_pingpong's time per transfer: half a round trip of one message."""
    command = ["fi_pingpong", "-p", provider, "-e", "rdm", "-I", "5000", "-S", str(_PINGPONG_BYTES)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            done = subprocess.run(
                ["bash", "-c", 'sleep 0.5; exec "$@"', "client", *command, address],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(5)
            server.kill()
    for line in done.stdout.splitlines():
        words = line.split()
        if len(words) == 8 and words[0] == str(_PINGPONG_BYTES):
            results["fi_pingpong", "latency", _PINGPONG_BYTES].append(float(words[6]))
