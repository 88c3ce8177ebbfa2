"""Imports the extension that Bazel built and runs one dispatch under jit, by the native kernels."""

import os
import sys

import numpy as np

ROOT = os.getcwd()  # the runfiles of the workspace: jax_ep/ and jax_ep/_core.so
TOKENS, HIDDEN, EXPERTS, TOP_K = 16, 8, 4, 2


def main() -> None:
    sys.path.insert(0, ROOT)
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    import jax_ep
    from jax_ep import _core

    assert _core.__file__ == os.path.join(ROOT, "jax_ep", "_core.so"), _core.__file__

    config = jax_ep.Config(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens=TOKENS,
        align=1,
        dtype=np.float32,
        mode="ht",
    )
    mesh = Mesh(np.array(jax.devices()[:1]), ("ep",))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TOKENS, HIDDEN), dtype=np.float32)
    experts = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    weights = np.ones((TOKENS, TOP_K), np.float32)

    with jax_ep.create_group(mesh, "ep", config, implementation="native") as group:

        def layer(x, experts, weights):
            recv = jax_ep.dispatch(group, x, experts, weights)
            return recv.x, recv.group_sizes

        mapped = jax.shard_map(layer, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        step = jax.jit(mapped)
        assert "@jax_ep_dispatch" in step.lower(x, experts, weights).as_text()
        rows, sizes = (np.asarray(out) for out in step(x, experts, weights))
        group.check()

    # Expert by expert, each one's tokens in order.
    expected = np.concatenate([x[(experts == expert).any(axis=1)] for expert in range(EXPERTS)])
    assert sizes.tolist() == [(experts == expert).sum() for expert in range(EXPERTS)], sizes
    np.testing.assert_array_equal(rows[: len(expected)], expected)
    print(f"{len(expected)} rows to {EXPERTS} experts, bit for bit, by {_core.__file__}")


if __name__ == "__main__":
    main()
