"""Calls beside other work on GPUs: bits, and the schedule that XLA makes of each program."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import pytest

PROGRAMS = pathlib.Path(__file__).parent / "programs"
sys.path.insert(0, str(PROGRAMS))
from schedule import beside  # noqa: E402

pytestmark = pytest.mark.gpu

FLAGS = {
    "default": "",
    "latency hiding": "--xla_gpu_enable_latency_hiding_scheduler=true",
}


def run(flags: str) -> dict[tuple[str, bool], str]:
    if jax.default_backend() != "gpu":
        pytest.skip("needs GPUs and `pytest -m gpu`")
    done = subprocess.run(
        [sys.executable, PROGRAMS / "overlap.py"],
        env={**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS[flags]}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "overlap DONE" in done.stdout  # and all bits were equal
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(line["program"], line["check_vma"]): line["schedule"] for line in lines}


@pytest.fixture(scope="module", params=FLAGS)
def schedules(request: Any) -> dict[tuple[str, bool], str]:
    return run(request.param)


def test_every_call_is_asynchronous(schedules: dict[tuple[str, bool], str]) -> None:
    for case, schedule in schedules.items():
        words = schedule.split()
        starts = [word[:-1] for word in words if word.endswith(">")]
        assert sorted(starts) == sorted(w[1:] for w in words if w.startswith("<")), case
        assert {"dispatch_rows", "combine_rows", "dispatch_dots"} <= set(starts), (case, schedule)
        assert not {"plan", "dispatch", "combine"} & set(words), (case, schedule)


def test_a_tied_dispatch_runs_beside_the_products(schedules: dict[tuple[str, bool], str]) -> None:
    for case in (("tied", True), ("tied", False), ("halves", True)):
        assert max(beside(schedules[case], "dispatch_rows")) >= 2, schedules[case]


def test_the_last_exchange_of_a_backward_runs_beside_the_gradients_of_weights(
    schedules: dict[tuple[str, bool], str],
) -> None:
    for case in (("tied", True), ("tied", False)):
        assert max(beside(schedules[case], "combine_rows")) >= 2, schedules[case]


def test_chunks_run_beside_each_other(schedules: dict[tuple[str, bool], str]) -> None:
    schedule = schedules["chunks", True]
    assert sum(count > 0 for count in beside(schedule, "dispatch_rows")) >= 1, schedule
    assert sum(count > 0 for count in beside(schedule, "combine_rows")) >= 1, schedule
