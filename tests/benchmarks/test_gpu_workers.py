"""The methods that the GPU benchmarks compare are right, and their programs run: on CPU, small."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import emulated_collectives
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_ep.testing import make_routing

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
RANKS, TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 4, 13, 8, 6, 8, 3
ROUTINGS = ("uniform", "zipf", "idle_rank")


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated_collectives.ragged_all_to_all)


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        ("2x NVIDIA H100 80GB HBM3", "2xh100"),
        ("4x NVIDIA H200", "4xh200"),
        ("8x AMD Instinct MI300X", "8xmi300x"),
    ],
)
def test_a_result_is_named_after_the_gpus(machine: str, name: str) -> None:
    from specs import file_name_of

    assert file_name_of(machine) == name


def inputs(routing):
    rng = np.random.default_rng(0)
    ids = make_routing(
        routing, num_ranks=RANKS, num_tokens=TOKENS, top_k=TOP_K, num_experts=EXPERTS
    ).reshape(RANKS, TOKENS, TOP_K)
    x = rng.standard_normal((RANKS, TOKENS, HIDDEN)).astype(np.float32)
    gates = rng.random((RANKS, TOKENS, TOP_K)).astype(np.float32)
    shapes = ((EXPERTS, HIDDEN, WIDTH), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN))
    kernels = tuple(rng.standard_normal(shape).astype(np.float32) / 3 for shape in shapes)
    return kernels, x, ids, gates


def per_rank(function):
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("ep",))
    spec = P("ep")
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def ragged_ffn(kernels, rows, group_sizes):
    w_gate, w_up, w_down = kernels
    dot = functools.partial(lax.ragged_dot, group_sizes=group_sizes)
    return dot(jax.nn.silu(dot(rows, w_gate)) * dot(rows, w_up), w_down)


def dense_loss(kernels, x, gates, ids):
    """Every expert on every token, without any exchange."""
    w_gate, w_up, w_down = kernels
    hidden = jax.nn.silu(jnp.einsum("nth,ehf->ntef", x, w_gate))
    hidden = hidden * jnp.einsum("nth,ehf->ntef", x, w_up)
    y = jnp.einsum("ntef,efh->nteh", hidden, w_down)
    chosen = jnp.take_along_axis(y, ids[..., None], axis=2)
    return 0.5 * jnp.sum(jnp.sum(chosen * gates[..., None], axis=2) ** 2)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("method", ["all_to_all", "ragged_all_to_all", "all_gather"])
def test_a_layer_has_the_loss_and_gradients_of_the_dense_one(method, routing):
    import moe_layers

    kernels, x, ids, gates = inputs(routing)
    sizes = moe_layers.sizes_of(ids, EXPERTS, HIDDEN)
    layer = moe_layers.BASELINES[method](sizes, ragged_ffn)

    def local(kernels, x, gates, ids):
        def loss(kernels, x, gates):
            return 0.5 * jnp.sum(layer(kernels, x, ids[0], gates) ** 2)

        value, (d_kernels, *d_others) = jax.value_and_grad(loss, argnums=(0, 1, 2))(
            kernels, x[0], gates[0]
        )
        return value[None], (d_kernels, *(d[None] for d in d_others))

    losses, grads = per_rank(local)(kernels, x, gates, ids)
    expected_loss, expected = jax.value_and_grad(dense_loss, argnums=(0, 1, 2))(
        kernels, x, gates, ids
    )
    np.testing.assert_allclose(np.sum(losses), expected_loss, rtol=1e-5)
    for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("method", ["DenseAllToAll", "RaggedAllToAll", "AllGather"])
def test_an_exchange_brings_every_token_to_its_experts_and_back(method, routing):
    from jax_ep._cli import baselines

    _, x, ids, gates = inputs(routing)
    gates /= gates.sum(axis=2, keepdims=True)
    sizes = baselines.Sizes(RANKS, TOKENS, HIDDEN, TOP_K, EXPERTS, capacity=TOKENS * TOP_K)
    exchange = getattr(baselines, method)(sizes)

    def local(x, ids, gates):
        rows, state = exchange.dispatch(x[0], ids[0], gates[0])
        owner = 1 + lax.axis_index("ep").astype(jnp.float32)
        return rows[None], exchange.combine(rows * owner, state, gates[0])[None]

    rows, out = map(np.asarray, per_rank(local)(x, ids, gates))
    owners = 1.0 + ids // (EXPERTS // RANKS)
    np.testing.assert_allclose(out, x * (gates * owners).sum(axis=2, keepdims=True), rtol=1e-5)
    if method == "AllGather":
        return  # every rank holds every token
    for rank in range(RANKS):
        pairs = np.argwhere(ids // (EXPERTS // RANKS) == rank)
        got = sorted(map(tuple, rows[rank].reshape(-1, HIDDEN)))
        padding = [(0.0,) * HIDDEN] * (len(got) - len(pairs))
        assert got == sorted([*(tuple(x[n, t]) for n, t, _ in pairs), *padding])


def test_a_second_run_keeps_what_it_does_not_measure():
    import run_gpu

    case = {"spec": "smoke", "mode": "ht", "routing": "uniform", "tokens": 8, "ranks": 2}
    results = []
    for tokens, us in ((8, {"a": 1}), (16, {"a": 2}), (8, {"b": 3}), (8, {"a": 4})):
        run_gpu.merge(results, {**case, "tokens": tokens, "us": us})
    assert [result["us"] for result in results] == [{"a": 4, "b": 3}, {"a": 2}]


@pytest.mark.ci
def test_the_programs_check_their_methods_and_write_what_they_measured(tmp_path):
    pytest.importorskip("matplotlib")
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, str(BENCHMARKS / "run_gpu.py"), "--out", str(tmp_path)]
    command += ["--only", "smoke", "layer smoke", "--commit", "test"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended with" not in done.stdout, done.stdout + done.stderr
    exchange, layer = (
        json.loads((tmp_path / f"{name}_2xcpu.json").read_text()) for name in ("exchange", "layer")
    )
    for report, methods in ((exchange, 3), (layer, 3)):
        assert report["machine"] == "2x cpu" and report["commit"] == "test"
        (result,) = report["results"]
        assert len(result["us"]) == methods
        assert set(result["commits"].values()) == {"test"}
    (result,) = layer["results"]
    assert set(result["outside_us"]) == set(result["us"]) == set(result["without_experts_us"])
    assert (tmp_path / "exchange_2xcpu.png").exists() and (tmp_path / "layer_2xcpu.png").exists()


@pytest.mark.ci
def test_what_overlap_hides_is_measured_against_the_same_layer(tmp_path):
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    command = [sys.executable, str(BENCHMARKS / "run_overlap.py"), "--out", str(tmp_path)]
    command += ["--specs", "smoke", "--tokens", "64", "--layers", "chunks=2", "--rounds", "9"]
    command += ["--seconds", "0", "--commit", "test"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "overlap_2xcpu.json").read_text())
    (layer,) = report["specs"]["smoke"].values()
    others = {"synchronous", "in order", "all_gather", "all_gather, LHS"}
    assert set(layer["us"]) == others | {"overlap", "products"}
    assert set(layer["saved_us"]) == set(layer["faster"]) == others
    assert layer["rounds"] == 3  # the fewest
    hidden = layer["saved_us"]["synchronous"] / layer["outside_us"]
    np.testing.assert_allclose(layer["hidden"], hidden, rtol=0.02, atol=0.01)


# What the programs of tests/kernels_gpu printed on four H100.
LL_OUTPUT = """\
{0}tokens 1: 3 remote rows; dispatch 9.3 us (5 GB/s) combine 12.4 us (3 GB/s) both 23.1 us; \
start+done: dispatch 20.5 us combine 20.6 us
{0}tokens 128: 350 remote rows; dispatch 24.8 us (202 GB/s) combine 28.0 us (179 GB/s) both \
53.6 us; start+done: dispatch 37.3 us combine 35.8 us
"""
FP8_OUTPUT = """\
bulk copies, 4 ranks, sms 0
ht by rank, 4096 tokens: bf16 496.6 us (1.00) fp8 to bf16 334.2 us (0.67) fp8 values and scales \
333.0 us (0.67)
"""
KERNELS_RUN = {
    "nodes": 2,
    "layout": 2,
    "zipf": 1,
    "sms": 0,
    "host_stores_gb_per_s": 36.9,
    "host_loads_gb_per_s": 47.3,
    "host_copies_gb_per_s": 5.0,
    "network_bytes": 58_500_000,
    "dispatch_us": 23_400.0,
    "combine_us": 11_700.0,
    "backward_us": 0.0,
}


def test_the_kernels_benchmarks_are_run_and_read(tmp_path, monkeypatch):
    """With programs in place of those that need GPUs: every part's file, its names and figures."""
    import run_kernels

    folder = tmp_path / "tests" / "kernels_gpu"
    folder.mkdir(parents=True)
    report = json.dumps({"copy_engine_gb_per_s": 375.5, "runs": [KERNELS_RUN]})
    programs = {
        "bench_ll": f"case \"$*\" in *rank_major*) cat <<'E'\n{LL_OUTPUT.format('rank_major ')}E\n"
        f";; *) cat <<'E'\n{LL_OUTPUT.format('')}E\n;; esac",
        "bench_fp8": f"cat <<'E'\n{FP8_OUTPUT}E",
        "bench_kernels": f"cat > $1 <<'E'\n{report}\nE",
        "nvidia-smi": "yes 'NVIDIA H100 80GB HBM3' | head -n 4",
    }
    for name, script in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "argv", ["run_kernels.py", str(tmp_path), "--out", str(tmp_path)])
    run_kernels.main()
    got = {
        part: json.loads((tmp_path / f"kernels_{part}_4xh100.json").read_text())
        for part in run_kernels.PARTS
    }
    assert {report["machine"] for report in got.values()} == {"4x NVIDIA H100 80GB HBM3"}
    by_expert, by_rank = got["ll"]["runs"]
    assert by_expert["layout"] == "expert_batched" and by_rank["layout"] == "rank_major"
    assert by_rank["dispatch"] == {"1": 9.3, "128": 24.8}
    assert by_rank["combine_start_and_done"] == {"1": 20.6, "128": 35.8}
    assert got["quantized"]["runs"][0]["fp8_values_and_scales_us"] == 333.0
    assert got["ht"]["copy_engine_gb_per_s"] == 375.5
    assert len(got["ht"]["runs"]) == len(list(run_kernels.ht_cases()))
    first = got["ht"]["runs"][0]
    assert first["layout"] == "rank_major" and first["routing"] == "zipf"
    assert "backward_us" not in first and "host_loads_gb_per_s" not in first
    (run,) = got["nodes"]["runs"]
    assert (run["bound_us"], run["dispatch_share"], run["combine_share"]) == (11_700.0, 0.5, 1.0)
    cuda = got["cuda"]
    assert cuda["runs"][0]["bound_us"] == 155.8  # 58.5 MB at 375.5 GB/s
    assert cuda["runs"][0]["dispatch_share"] == round(155.8 / 23_400, 3)
    assert cuda["ll"]["cuda"]["dispatch"] == cuda["ll"]["loopback"]["dispatch"] != {}
