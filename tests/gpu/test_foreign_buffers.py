"""Rows outside XLA's exported arena: staged for that call and that source alone, never wrong.

Each program runs once, in a process of its own because its memory settings are its own; the tests
read the lines that it prints.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import pytest

PROGRAM = pathlib.Path(__file__).parent / "programs" / "foreign_buffers.py"
LIMIT_S = 150
POOLS = {
    "arena": {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".2"},
    "grown": {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".05",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    },
}

pytestmark = pytest.mark.gpu

Cases = dict[str, dict[str, Any]]


def cases_of(kind: str) -> Cases:
    if jax.default_backend() != "gpu":
        pytest.skip("needs GPUs and `pytest -m gpu`")
    done = subprocess.run(
        [sys.executable, PROGRAM, kind],
        env={**os.environ, **POOLS[kind]},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "foreign buffers DONE" in done.stdout
    print(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["case"]: line for line in lines}


@pytest.fixture(scope="module")
def cases() -> Cases:
    return cases_of("arena")


def check(case: dict[str, Any], sources: str) -> None:
    """The result was right, and `sources` ("none", "first", "all") staged their rows."""
    assert case["refused"] is None
    assert case["wrong"] is None
    how_many = {"none": 0, "first": 1, "all": case["num_ranks"]}[sources]
    others = case["num_ranks"] - how_many
    assert case["staged"] == [case["x_bytes"]] * how_many + [0] * others


def test_rows_in_the_arena_are_read_in_place(cases: Cases) -> None:
    assert cases["data path"]["is"] == "in place"
    check(cases["arena"], "none")


def test_a_dlpack_buffer_is_staged_by_its_rank_alone(cases: Cases) -> None:
    check(cases["dlpack"], "first")
    check(cases["arena after dlpack"], "none")


def test_a_constant_of_the_module_is_staged(cases: Cases) -> None:
    assert cases["constant is in the module"]["is"]
    check(cases["constant"], "all")
    check(cases["arena after constant"], "none")


def test_offloaded_rows_that_the_program_fetches_are_read_in_place(cases: Cases) -> None:
    check(cases["offloaded"], "none")


def test_offloaded_rows_as_operands_are_refused_or_staged(cases: Cases) -> None:
    """JAX 0.10 refuses to mix memory spaces; a version that does not must get the right rows."""
    case = cases["offloaded operand"]
    if case["refused"] is None:
        check(case, "all")
    else:
        assert "memory" in case["refused"]
        assert not any(case["staged"])
    check(cases["arena after offloaded operand"], "none")


def test_the_group_says_how_many_launches_staged(cases: Cases) -> None:
    num_staged = sum(
        byte_count > 0 for case in cases.values() for byte_count in case.get("staged", [])
    )
    assert num_staged > 0
    assert cases["data path at the end"]["is"].startswith(f"in place, but {num_staged} launches")


def test_rows_where_the_pool_grew_to_are_staged_by_their_rank_alone() -> None:
    cases = cases_of("grown")
    if cases["data path"]["is"] != "in place":
        pytest.skip(f"XLA exports no range of a pool that grows: {cases['data path']['is']}")
    check(cases["arena"], "none")
    assert cases["the pool grew"]["is"]
    check(cases["grown"], "first")
    check(cases["arena after grown"], "none")
