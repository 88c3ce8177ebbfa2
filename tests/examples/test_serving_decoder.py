"""The decoder's step: the text of a request is the trained model's, whatever shares the batch."""

import functools
import itertools

import jax
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

from flax import nnx
from jax.sharding import PartitionSpec as P
from moe_lm import checkpoint
from moe_lm.model import Transformer
from moe_serve.decoder import AXIS, Decoder, group_config
from moe_serve.work import Shape
from tiny_world import PROMPTS, SIZE, WINDOW, World

import jax_ep
from jax_ep.flax import ExpertParam


@pytest.fixture(scope="module")
def one_rank():
    world = World(1, "xla")
    with world.group:
        yield world


# 3 ranks do not divide 4 experts: some experts have a replica.
@pytest.fixture(scope="module", params=[(1, None), (3, "xla"), (4, None)], ids=str)
def world(request, one_rank):
    if request.param[0] == 1:
        yield one_rank
        return
    world = World(*request.param)
    with world.group:
        yield world


def requests(temperature):
    """Several, of many lengths; (prompt, max_tokens, temperature, seed)."""
    return [
        (PROMPTS[number % len(PROMPTS)], 5 + 3 * (number % 6), temperature, number)
        for number in range(14)
    ]


@pytest.fixture(scope="module")
def expected_texts(one_rank):
    """{temperature: texts}, each request alone on one rank."""
    return {
        temperature: [one_rank.complete([one], [0])[0] for one in requests(temperature)]
        for temperature in (0.0, 0.9)
    }


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_text_does_not_depend_on_batch_mates_nor_on_the_number_of_ranks(
    world, expected_texts, temperature
):
    arrivals = np.random.default_rng(5).integers(0, 20, 14)
    texts = world.complete(requests(temperature), arrivals)
    assert texts == expected_texts[temperature]
    assert len({text[-4:] for text in texts}) > 5


def test_nothing_recompiles_while_requests_come_and_go(world):
    world.complete(requests(0.5)[:3], [0, 0, 0])
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **more: compiled.append(event) if "compile" in event else None
    )
    # The listener stays: JAX can only remove all of them, and jax_ep has some.
    world.complete(requests(0.9), range(0, 28, 2))
    world.complete(requests(0.0)[:1], [0])
    assert not compiled and world.decoder.step._cache_size() == 1


def test_texts_and_programs_stay_while_experts_move(expected_texts):
    world = World(2, None, redundant=3)  # of 4 experts, in 8 slots
    rng, moves = np.random.default_rng(3), []

    def move(step):
        if step % 3 == 0:
            slots = np.stack(
                [rng.permutation([0, 1, 2, 3, *rng.integers(0, 4, 4)]) for _ in range(SIZE.layers)]
            )
            world.ranks.place(slots.astype(np.int32))
            moves.append(slots)

    with world.group:
        texts = world.complete(requests(0.9), range(0, 28, 2), move)
        load = world.ranks.read_load()
        assert world.decoder.step._cache_size() == 1
        assert not world.ranks.read_load().any()
    assert texts == expected_texts[0.9]
    assert len(moves) > 10 and any((a != b).any() for a, b in itertools.pairwise(moves))
    check_load(load, texts)


def check_load(load, texts):
    """Each byte was counted once: all but the last of a text that did not end by itself."""
    num_read = sum(
        len(text) - (len(text) == max(1, len(prompt)) + max_tokens)
        for text, (prompt, max_tokens, *_) in zip(texts, requests(0.9), strict=True)
    )
    assert load.sum(axis=1).tolist() == [SIZE.top_k * num_read] * SIZE.layers


def test_a_step_that_ended_here_and_failed_elsewhere_is_run_again_with_the_same_bytes(
    expected_texts,
):
    world = World(2, None, elastic=True)
    run, steps = world.ranks.run, itertools.count()

    def run_twice(rows):
        tokens, step = run(rows), next(steps)
        if step % 3:
            return tokens
        world.ranks.agree(step)
        again = run(rows)
        assert all(np.array_equal(again[rank], tokens[rank]) for rank in tokens)
        return again

    world.ranks.run = run_twice
    with world.group:
        texts = world.complete(requests(0.9), range(0, 28, 2))
        load = world.ranks.read_load()
        assert world.decoder.step._cache_size() == 1
        world.ranks.agree(next(steps))
        with pytest.raises(RuntimeError, match=r"has run \d+ steps, expected 0"):
            world.ranks.agree(0)
    assert texts == expected_texts[0.9]
    check_load(load, texts)


def test_the_text_is_the_one_that_the_trained_model_finds_likeliest(one_rank, monkeypatch):
    world = one_rank
    attention = functools.partial(
        jax.nn.dot_product_attention, local_window_size=(WINDOW - 1, 0)
    )  # the ring's window
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    config = group_config(SIZE, Shape(1, 1, 64))
    with jax_ep.create_group(world.mesh, AXIS, config, implementation="xla") as group:
        model = Transformer(SIZE, group, np.random.default_rng(0))
        graph = nnx.split(model, ExpertParam, nnx.Param)[0]

        def logits(dense, experts, tokens):
            return nnx.merge(graph, experts, dense)(tokens)[0]

        specs = {"in_specs": (P(), P(AXIS), P()), "out_specs": P(), "check_vma": False}
        of_text = jax.jit(jax.shard_map(logits, mesh=world.mesh, **specs))
        prompt = PROMPTS[2]
        (text,) = world.complete([(prompt, 30, 0.0, 0)], [0])
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(text)] = list(text)
        likeliest = np.asarray(of_text(world.dense, world.experts, padded))[0].argmax(axis=-1)
    begin = len(prompt)
    assert len(text) > WINDOW + begin
    assert bytes(likeliest[begin - 1 : len(text) - 1].tolist()) == text[begin:]


def test_chunks_longer_than_the_window_are_refused(one_rank):
    with pytest.raises(ValueError, match="got chunks of 13 bytes, expected at most 12"):
        Decoder(one_rank.mesh, one_rank.group, SIZE, Shape(1, 1, 13), WINDOW)


def test_a_saved_model_is_the_one_that_was_saved(one_rank, tmp_path):
    source, trained = one_rank, checkpoint.Trained(SIZE, 32)
    placed = jax.tree.map(jax.numpy.asarray, (source.dense, source.experts))
    for _ in range(2):  # the second takes the first one's place
        checkpoint.save(tmp_path, trained, *placed)
    assert checkpoint.load_sizes(tmp_path) == trained
    dense, experts = checkpoint.load_parameters(
        tmp_path, source.decoder.dense, source.decoder.experts
    )
    for got, wanted in zip(
        jax.tree.leaves((dense, experts)),
        jax.tree.leaves((source.dense, source.experts)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, wanted)


def test_no_model_and_another_format_are_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"model\.json is missing; train a model first"):
        checkpoint.load_sizes(tmp_path)
    (tmp_path / "model.json").write_text('{"format": 0}')
    with pytest.raises(SystemExit, match="got format 0, expected 1; train again"):
        checkpoint.load_sizes(tmp_path)
