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


def run(program: str, flags: str) -> str:
    if jax.default_backend() != "gpu":
        pytest.skip("needs GPUs and `pytest -m gpu`")
    done = subprocess.run(
        [sys.executable, PROGRAMS / f"{program}.py"],
        env={
            **os.environ,
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS[flags]}".strip(),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=FLAGS)
def schedules(request: Any) -> dict[tuple[str, bool], str]:
    """Of each program, whose bits have then been equal to those without overlap."""
    text = run("overlap", request.param)
    assert "overlap DONE" in text
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {(line["program"], line["check_vma"]): line["schedule"] for line in lines}


@pytest.mark.parametrize("flags", FLAGS)
def test_training_beside_native_collectives_gives_the_same_bits(flags: str) -> None:
    assert "overlap training DONE" in run("overlap_training", flags)


def test_every_call_is_asynchronous(schedules: dict[tuple[str, bool], str]) -> None:
    for case, schedule in schedules.items():
        words = schedule.split()
        starts = [word[:-1] for word in words if word.endswith(">")]
        assert sorted(starts) == sorted(w[1:] for w in words if w.startswith("<")), case
        assert {"dispatch_rows", "combine_rows"} <= set(starts), (case, schedule)
        assert not {"plan", "dispatch", "combine"} & set(words), (case, schedule)


def test_a_tied_dispatch_runs_beside_the_products(schedules: dict[tuple[str, bool], str]) -> None:
    for case in (("tied", True), ("tied", False), ("halves", True)):
        assert max(beside(schedules[case], "dispatch_rows")) >= 2, schedules[case]


def test_the_last_exchange_of_a_backward_runs_beside_the_gradients_of_weights(
    schedules: dict[tuple[str, bool], str],
) -> None:
    for case in (("tied", True), ("tied", False)):
        assert max(beside(schedules[case], "combine_rows")) >= 2, schedules[case]


def test_an_exchange_of_one_chunk_runs_beside_the_experts_of_another(
    schedules: dict[tuple[str, bool], str],
) -> None:
    exchanges = ("dispatch_rows", "dispatch_weights", "combine_rows", "combine_scalars")
    for case in (("chunks", True), ("chunks", False)):
        counts = {name: max(beside(schedules[case], name)) for name in exchanges}
        assert max(counts.values()) >= 2, (counts, schedules[case])
