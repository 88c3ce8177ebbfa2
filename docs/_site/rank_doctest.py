"""The builder `doctest`, for examples that call operations: these run inside shard_map.

A page that begins with the field `ranks: true` is one program. Its examples are traced, in their
order, with the arrays of one of four ranks, which `_arrays` makes. Then the program is compiled and
run, and its result depends on every array that an example assigned, so that nothing is left out.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from sphinx.ext import doctest

import jax_ep

RANKS, TOKENS, HIDDEN, EXPERTS, TOP_K = 4, 16, 256, 8, 2
_names = {}  # of the page at hand: what its examples find, then what they have made


def _arrays():
    """What the examples find, for all ranks."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32) / 16, jnp.bfloat16)

    tokens = RANKS * TOKENS
    ids = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOP_K]
    return {
        "x": normal(tokens, HIDDEN),
        "topk_idx": jnp.asarray(ids, jnp.int32),
        "topk_weights": jnp.full((tokens, TOP_K), 0.5),
        "payload": jnp.asarray(rng.integers(0, 256, (tokens, 64)), jnp.uint8),
        "kernels": normal(EXPERTS, HIDDEN, HIDDEN),
        "w_gate": normal(EXPERTS, HIDDEN, 128),
        "w_up": normal(EXPERTS, HIDDEN, 128),
        "w_down": normal(EXPERTS, 128, HIDDEN),
    }


class RankDocTestBuilder(doctest.DocTestBuilder):
    """sphinx.ext.doctest's builder, which runs some pages inside shard_map."""

    def test_doc(self, docname, doctree):
        """Tests one page."""
        self._ranks = "ranks" in self.env.metadata.get(docname, {})
        return super().test_doc(docname, doctree)

    def test_group(self, group):
        """Tests the examples of one page."""
        if not self._ranks:
            return super().test_group(group)
        passed = []

        def on_one_rank(arrays):
            global _names
            _names = dict(arrays, group=ep_group)
            passed.append(super(RankDocTestBuilder, self).test_group(group))
            results = [
                leaf for leaf in jax.tree.leaves(_names) if isinstance(leaf, jax.core.Tracer)
            ]
            total = sum((jnp.sum(leaf.astype(jnp.float32)) for leaf in results), jnp.float32(0))
            return jax.lax.psum(total, "ep")

        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
        config = jax_ep.Config(
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden=HIDDEN,
            max_tokens=TOKENS,
            align=8,
            max_in_flight=7,  # XLA may start all exchanges of the page first
        )
        program = jax.shard_map(
            on_one_rank, mesh=mesh, in_specs=P("ep"), out_specs=P(), check_vma=False
        )
        with jax_ep.create_group(mesh, "ep", config) as ep_group:
            try:
                jax.block_until_ready(jax.jit(program)(_arrays()))
            except Exception as error:
                self._warn_out(f"the examples cannot be compiled or run together: {error}\n")
                self.total_failures += 1
                return False
        return all(passed)


def enter(names):
    """Called by the setup of a page: gives its examples their arrays and keeps what they make."""
    global _names
    names.update(_names)
    _names = names


def setup(app):
    """Sphinx calls it."""
    app.setup_extension("sphinx.ext.doctest")
    app.add_builder(RankDocTestBuilder, override=True)
    return {"parallel_read_safe": True}
