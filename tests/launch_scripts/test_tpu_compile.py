"""implementation="xla" compiled for TPUs, without one: `.ci/run tpu` brings libtpu."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from scripts import run

PROGRAMS = ("dispatch", "combine", "layer_gradient", "training_step")
MAX_BYTES = 2**30
LIMIT_S = 900.0

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed (pip install libtpu, or bash .ci/run tpu)",
    ),
    pytest.mark.timeout(LIMIT_S + 60),
]


def reports(topology, *programs):
    """What compile_for_tpu.py says of each program; a process can use libtpu once."""
    script = Path(__file__).with_name("compile_for_tpu.py")
    extra = {"NPROC": 32, "XLA_FLAGS": ""}  # conftest.py's flags are for CPUs
    said = run(sys.executable, script, topology, *programs, limit_s=LIMIT_S, **extra)
    lines = [line for line in said.splitlines() if line.startswith('{"program"')]
    print("\n".join(lines))
    return {report["program"]: report for report in map(json.loads, lines)}


def types(report, name):
    """Element types of the collectives of that name."""
    return {element for found, element, _ in report["collectives"] if found == name}


@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
def test_programs_compile(topology):
    for package in ("flax", "optax"):
        pytest.importorskip(package)
    got = reports(topology, *PROGRAMS)
    assert tuple(got) == PROGRAMS
    assert not any(report["native_calls"] for report in got.values())
    # Ids are integers, weights and partials f32; rows of bf16 travel as integers.
    assert types(got["dispatch"], "all-gather") == {"s32", "f32", "u16"}
    assert types(got["combine"], "all-to-all") == {"f32"}
    assert types(got["layer_gradient"], "all-to-all") == {"f32"}
    assert types(got["training_step"], "all-to-all") == {"f32"}


def test_an_exchange_above_the_limit_goes_in_pieces():
    got = reports("v5e:8x8", "large_combine")["large_combine"]
    assert types(got, "all-to-all") == {"f32"}
    assert max(size for *_, size in got["collectives"]) == MAX_BYTES
