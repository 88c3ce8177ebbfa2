"""JAX_EP_TRACE on GPUs: every operation with its line, and the waits that were long."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from jax_ep._cli.trace_files import Kind, find, read

PROGRAM = pathlib.Path(__file__).parent / "programs" / "late_rank.py"
HALVES = ("dispatch_start", "dispatch_done", "combine_start", "combine_done")
CALLS = {
    ("ht", None): ["plan", "dispatch", "combine"],
    ("ht", 1): ["plan", "dispatch", "combine"],
    ("ll", None): ["dispatch (ll)", "combine (ll)"],
    ("ll", 1): [f"{half} (ll)" for half in HALVES],  # between nodes the kernels work in halves
}

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]


@pytest.mark.parametrize(("mode", "node_size"), CALLS)
def test_every_operation_and_the_long_wait_are_there(
    mode: str, node_size: int | None, tmp_path: pathlib.Path
) -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU and `pytest -m gpu`")
    prefix = tmp_path / "run"
    command = [sys.executable, "-m", "jax_ep", "launch", "-n", "2", str(PROGRAM), "--mode", mode]
    command += [] if node_size is None else ["--node-size", str(node_size)]
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": first, "JAX_EP_TRACE": str(prefix)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = PROGRAM.read_text().splitlines()
    line_of = {
        word: f"{PROGRAM}:{number}"
        for number, line in enumerate(lines, start=1)
        for word in ("DISPATCH", "COMBINE")
        if f"# {word}" in line
    }
    processes = [read(path) for path in find(str(prefix))]
    assert len(processes) == 2
    for process in processes:
        (track,) = [track for track in process.tracks.values() if track.kind == "rank"]
        calls = track.events[track.events["kind"] == Kind.CALL]
        names = [track.names[name] for name in calls["name"]]
        assert names == 6 * CALLS[mode, node_size]
        assert calls["value"].tolist() == list(range(1, len(calls) + 1))
        assert (calls["begin"] <= calls["end"]).all()
        assert (calls["end"][:-1] <= calls["begin"][1:]).all()
        for name, site in zip(names, calls["detail"], strict=True):
            expected = line_of["COMBINE" if name.startswith("combine") else "DISPATCH"]
            assert process.sites[int(site)] == expected
        seconds = (calls["end"] - calls["begin"]) / 1e9
        waits = track.events[track.events["kind"] == Kind.PHASE]
        late = 5 * len(CALLS[mode, node_size])  # the first call after the warm-up
        if track.rank == 0:
            (wait,) = [wait for wait in waits if int(wait["end"] - wait["begin"]) > 2e9]
            assert wait["peer"] == 1
            (slow,) = np.flatnonzero(seconds > 2)
            assert late <= slow < late + 2  # the call that was late, or its done
            assert calls["begin"][slow] <= wait["begin"] + 10**7
            assert wait["end"] <= calls["end"][slow] + 10**7
        else:
            assert seconds[late:].max() < 2
    if importlib.util.find_spec("perfetto") is None:
        return  # tests/multiprocess/test_trace.py merges files like these
    out = tmp_path / "run.pftrace"
    command = [sys.executable, "-m", "jax_ep", "trace", str(prefix), "--out", str(out)]
    merged = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert merged.returncode == 0 and out.stat().st_size > 0, merged.stdout + merged.stderr
