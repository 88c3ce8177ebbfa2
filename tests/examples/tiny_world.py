"""A small model with random parameters, on some of this process's devices."""

import itertools

import jax
import numpy as np
from jax.sharding import Mesh
from moe_lm import checkpoint
from moe_lm.model import ModelSize
from moe_serve.decoder import AXIS, Decoder, group_config
from moe_serve.ranks import Ranks
from moe_serve.scheduler import Request, Scheduler
from moe_serve.work import Shape

import jax_ep

SIZE = ModelSize(width=16, layers=2, heads=2, expert_width=16, num_experts=4, top_k=2)
WINDOW = 12
SLOTS, CHUNK = 3, 8
PROMPTS = (b"def ", b"", b"x = [1, 2, 3]\nfor i in x:\n", b"import os", b"class A:\n    def")


class World:
    """A decoder on some devices, with random parameters that are the same on any number."""

    def __init__(self, num_ranks, implementation, redundant=0, **options):
        mesh = Mesh(np.array(jax.devices()[:num_ranks]), (AXIS,))
        self.mesh, self.shape = mesh, Shape(num_ranks, SLOTS, CHUNK)
        config = group_config(SIZE, self.shape, redundant, **options)
        self.group = jax_ep.create_group(mesh, AXIS, config, implementation=implementation)
        self.decoder = Decoder(mesh, self.group, SIZE, self.shape, WINDOW)
        rng = np.random.default_rng(1)

        def draw(leaf):  # also the head, which is zero before a training
            scale = leaf.shape[-2] ** -0.5 if leaf.ndim > 1 else 1.0
            return (rng.standard_normal(leaf.shape) * scale).astype(leaf.dtype)

        self.dense, self.experts = jax.tree.map(draw, (self.decoder.dense, self.decoder.experts))
        self.ranks = Ranks(self.decoder, self.group, self.dense, self.experts)

    def save(self, folder):
        """Its parameters, as a training leaves them."""
        placed = jax.tree.map(jax.numpy.asarray, (self.dense, self.experts))
        checkpoint.save(folder, checkpoint.Trained(SIZE, WINDOW), *placed)

    def complete(self, asked, arrivals, before_step=lambda step: None):
        """Texts of (prompt, max_tokens, temperature, seed); arrivals are steps."""
        scheduler = Scheduler(self.shape)
        requests = [Request(*one, lambda event: None) for one in asked]
        waiting = sorted(zip(arrivals, range(len(requests)), requests, strict=True))
        for step in itertools.count():
            while waiting and waiting[0][0] <= step:
                scheduler.add(waiting.pop(0)[2])
            before_step(step)
            rows = scheduler.next_step()
            if rows is not None:
                scheduler.accept(self.ranks.run(rows))
            elif not waiting:
                return [bytes(request.text) for request in requests]
