"""Group.report on GPUs: a rank that waits tells by itself for whom, also in the log."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

PROGRAM = pathlib.Path(__file__).parent / "programs" / "late_rank.py"
PHASES = PROGRAM.with_name("late_phases.py")
# The call in which the others wait, and the mark of its line. A backward call is the other
# operation, and has the line of the forward one.
CALLS = {
    "plan": ("plan", "PLAN"),
    "dispatch": ("dispatch", "DISPATCH"),
    "combine": ("combine", "COMBINE"),
    "dispatch-backward": ("combine", "DISPATCH"),
    "combine-backward": ("dispatch", "COMBINE"),
    "ll-dispatch": ("dispatch (ll)", "LL DISPATCH"),
    "ll-combine": ("combine (ll)", "LL COMBINE"),
    "ll-dispatch-halves": ("dispatch_done (ll)", "LL DISPATCH DONE"),
    "ll-combine-halves": ("combine_done (ll)", "LL COMBINE DONE"),
    "stopped": ("plan", "PLAN"),
}

LATE_S, STOPPED_S = 1.5, 4.5  # of the program

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]


def run_two(program: pathlib.Path, *options: object) -> subprocess.CompletedProcess[str]:
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU and `pytest -m gpu`")
    # Both processes use the first GPU, whose kernels then take turns.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    launch = [sys.executable, "-m", "jax_ep", "launch", "-n", "2", str(program)]
    done = subprocess.run(
        [*launch, *map(str, options)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": first},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done


def line_of(mark: str, program: pathlib.Path) -> int:
    lines = program.read_text().splitlines()
    return next(n for n, line in enumerate(lines, start=1) if line.endswith(f"  # {mark}"))


@pytest.mark.parametrize("mode", ["ht", "ll"])
@pytest.mark.parametrize("node_size", [None, 1])
def test_a_late_rank_is_named_while_the_others_wait(mode: str, node_size: int | None) -> None:
    nodes = [] if node_size is None else ["--node-size", node_size]
    done = run_two(PROGRAM, "--mode", mode, *nodes)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    page = re.findall(r"PAGE (.*)", done.stdout)
    late = line_of("DISPATCH", PROGRAM)
    assert re.search(r"rank 1 \(process 1\) has kept rank 0 waiting for 2\.\d s: ", page[0]), text
    waits = next(line for line in page if line.startswith("  rank 0"))
    call = "plan" if mode == "ht" else "dispatch"
    assert re.search(rf"{call}.* at .*late_rank\.py:{late}: waits for rank 1 for 2\.\d s", waits)
    idle = next(line for line in page if line.startswith("  rank 1"))
    if node_size is None:
        newest = r"its host has enqueued \d+, the newest \d+\.\d s ago: combine"
        assert re.search(newest, idle), text
    else:
        assert "in another node" in idle, text
    assert "a rank has waited longer than a tenth of timeout_s" in text
    after = re.findall(r"AFTER (.*)", done.stdout)
    assert len(after) == 2 and all("nobody is waiting" in line for line in after), text


@functools.cache
def phases(node_size: int | None) -> subprocess.CompletedProcess[str]:
    return run_two(PHASES, *([] if node_size is None else ["--node-size", node_size]))


@pytest.mark.parametrize("phase", CALLS)
@pytest.mark.parametrize("node_size", [None, 1])
def test_a_rank_that_is_late_for_any_operation_is_named(phase: str, node_size: int | None) -> None:
    done = phases(node_size)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    page = re.findall(rf"^(?:\[0\] )?{phase}: (.*)", done.stdout, re.MULTILINE)
    call, mark = CALLS[phase]
    if node_size is not None and "done" not in call:  # a whole call there is a start and a done
        call = call.replace(" (ll)", "_done (ll)")
    late = "rank 1 (process 1) has kept rank 0 waiting for "
    assert page and late in page[0], text
    waits = next(line for line in page if line.startswith("  rank 0, process 0"))
    place = rf" at .*late_phases\.py:{line_of(mark, PHASES)}: waits for rank 1 for \d\.\d s"
    assert re.search(rf"call \d+, {re.escape(call)}( epoch \d+)?{place}", waits), text
    other = next(line for line in page if line.startswith("  rank 1, process 1"))
    (waited,) = (line.split()[1:] for line in page if line.startswith("WAITED"))
    seconds = dict(zip(waited[::2], map(float, waited[1::2]), strict=True))
    assert seconds.keys() == {"plan", "dispatch", "combine", "reuse"}, text
    for name, value in seconds.items():
        late_s = STOPPED_S if phase == "stopped" else LATE_S
        if name == re.split("[ _]", call)[0]:  # phases of waits are named as operations
            assert 0.6 * late_s < value < late_s + 2, (name, waited, text)
        else:
            assert value < 0.3 * late_s, (name, waited, text)
    # Only the process that stopped is late enough for that.
    assert "a rank has waited longer than a tenth of timeout_s" in text
    if node_size is not None:
        assert "it is in another node" in page[0] and "in another node" in other, text
    elif phase == "stopped":
        assert "its process has been silent for " in page[0] and "SILENT for " in other, text
    else:
        assert "no call of it is known to wait; its host has enqueued" in page[0], text
