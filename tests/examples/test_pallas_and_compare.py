"""examples/pallas_experts.py and examples/compare.py run as written and give what they state."""

import json
import subprocess
import sys
from pathlib import Path

import children
import emulated_collectives
import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytest.importorskip("matplotlib")


def launch(example, *options, processes=2):
    command = [sys.executable, "-m", "jax_ep", "launch", "-n", str(processes)]
    return subprocess.run(
        [*command, str(EXAMPLES / example), *options],
        capture_output=True,
        text=True,
        timeout=600,
        env={**children.quick(), "JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.multiprocess
def test_pallas_experts_equal_ragged_dot_and_learn():
    done = launch("pallas_experts.py", "--steps", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pallas experts on 2 cpu device(s): loss and gradients equal ragged_dot's" in done.stdout


@pytest.mark.ci
@pytest.mark.multiprocess
def test_compare_checks_and_measures_every_method(tmp_path):
    sizes = ("--tokens", "16", "--skews", "0,1.5", "--hidden", "16", "--width", "16")
    done = launch("compare.py", *sizes, "--repeats", "3", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "compare.json").read_text())
    assert (tmp_path / "compare.png").stat().st_size > 10_000
    for skew in (0.0, 1.5):
        case = {row["method"]: row for row in rows if row["skew"] == skew}
        assert len(case) == 4
        # XLA:CPU has no ragged_all_to_all; the test below checks that layer's arithmetic.
        assert "left_out" in case.pop("lax.ragged_all_to_all")
        for row in case.values():
            assert row["equal"], row
            assert row["forward_ms"] > 0 and row["step_ms"] > 0 and row["peak_mib"] > 0
    busiest = [row["busiest"] for row in rows]
    assert max(busiest) > min(busiest) >= 1


@pytest.fixture
def compare(monkeypatch):
    """The module examples/compare.py."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import compare

    return compare


def ragged_case(compare, skew):
    options = type("", (), dict(experts_per_rank=2, top_k=2, hidden=8, width=8))
    sizes, arrays, _ = compare.make_case(options, 4, 12, skew)
    layers = compare.layers
    mesh = Mesh(np.array(jax.devices()[:4]), (layers.AXIS,))
    step = compare.forward_and_step(layers.with_ragged_all_to_all(sizes))[1]
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    oracle = jax.jit(compare.forward_and_step(layers.dense(sizes))[1])
    return mapped, oracle, arrays


@pytest.mark.parametrize("skew", [0.0, 3.0])
def test_the_ragged_layer_is_the_dense_one(compare, monkeypatch, skew):
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated_collectives.ragged_all_to_all)
    mapped, oracle, arrays = ragged_case(compare, skew)
    got, expected = jax.jit(mapped)(arrays), oracle(arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_the_ragged_layer_lowers_where_xla_has_the_operation(compare):
    mapped, _, arrays = ragged_case(compare, 0.0)
    for platform in ("tpu", "cuda"):
        text = jax.jit(mapped).trace(arrays).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("@ragged_all_to_all") >= 2
