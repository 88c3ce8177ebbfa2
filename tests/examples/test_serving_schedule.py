"""Continuous batching without JAX: whatever comes and goes, each request gets its own text."""

import random

import numpy as np
import pytest
from fake_model import FakeRanks, completion
from moe_serve.scheduler import Request, Scheduler
from moe_serve.work import Shape


class Asked:
    """A request, and what was delivered."""

    def __init__(self, prompt, max_tokens, seed):
        self.expected = completion(prompt, seed, max_tokens)
        self.events = []
        self.request = Request(prompt, max_tokens, 0.5, seed, self.events.append)

    @property
    def is_done(self):
        return bool(self.events) and isinstance(self.events[-1], str)

    def check(self):
        assert (bytes(self.events[:-1]), self.events[-1]) == self.expected


@pytest.mark.parametrize("seed", range(8))
def test_every_request_gets_its_text_whatever_else_is_in_the_batch(seed):
    rng = random.Random(seed)
    shape = Shape(rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 9))
    scheduler, ranks = Scheduler(shape), FakeRanks(shape)
    waiting = [
        Asked(rng.randbytes(rng.randrange(30)), rng.randint(1, 25), rng.randrange(1 << 31))
        for _ in range(40)
    ]
    asked, cancelled = [], []
    for _ in range(3000):
        for _ in range(rng.choice((0, 0, 1, 3))):
            if waiting:
                asked.append(waiting.pop())
                scheduler.add(asked[-1].request)
        if asked and rng.random() < 0.02:
            cancelled.append(asked.pop(rng.randrange(len(asked))))
            scheduler.cancel(cancelled[-1].request)
        rows = scheduler.next_step()
        if rows is not None:
            scheduler.accept(ranks.run(rows))
        elif not waiting:
            break
    assert not waiting and not scheduler.requests() and len(asked) > 10
    for one in asked:
        one.check()


def test_a_cancelled_request_leaves_its_slot_and_gets_nothing_more():
    shape = Shape(1, 1, 4)
    scheduler, ranks = Scheduler(shape), FakeRanks(shape)
    first, second = Asked(b"abcdefghij", 1000, 1), Asked(b"xy", 3, 2)
    scheduler.add(first.request)
    scheduler.add(second.request)
    scheduler.accept(ranks.run(scheduler.next_step()))
    assert scheduler.num_running == 1 and not second.events
    scheduler.cancel(first.request)
    while (rows := scheduler.next_step()) is not None:
        scheduler.accept(ranks.run(rows))
    assert not first.events
    second.check()


def test_requests_go_where_most_slots_are_free_in_the_order_they_came():
    shape = Shape(2, 2, 4)
    scheduler = Scheduler(shape)
    asked = [Asked(b"abc", 50, seed) for seed in range(5)]
    for one in asked:
        scheduler.add(one.request)
    scheduler.next_step()
    names = {id(one.request): number for number, one in enumerate(asked)}
    assert [[names[id(r)] for r in slots] for slots in scheduler.slots] == [[0, 2], [1, 3]]
    assert list(scheduler.queue) == [asked[4].request]


def test_a_rank_that_does_not_answer_keeps_its_requests_as_they_were():
    shape = Shape(2, 1, 4)
    scheduler, ranks = Scheduler(shape), FakeRanks(shape)
    asked = [Asked(b"abcdef", 4, seed) for seed in (3, 4)]
    for one in asked:
        scheduler.add(one.request)
    tokens = ranks.run(scheduler.next_step())
    assert scheduler.accept({0: tokens[0]}) == 0
    assert asked[0].request.prefilled == 4 and asked[1].request.prefilled == 0


@pytest.mark.parametrize("seed", range(6))
def test_requests_of_lost_ranks_go_on_elsewhere_with_the_same_text(seed):
    """Each is lost in a step that was computed but not accepted; nobody notices."""
    rng = random.Random(seed)
    shape = Shape(4, rng.randint(1, 3), rng.randint(1, 9))
    scheduler, ranks = Scheduler(shape), FakeRanks(shape)
    asked = [
        Asked(rng.randbytes(rng.randrange(30)), rng.randint(1, 60), rng.randrange(1 << 31))
        for _ in range(40)
    ]
    for one in asked:
        scheduler.add(one.request)
    losses, living = {15: [3], 16: [1], 40: [2]}, {0, 1, 2, 3}
    for step in range(3000):
        rows = scheduler.next_step()
        if rows is None:
            break
        if step in losses:
            lost = losses[step]
            had = [request for rank in lost for request in scheduler.slots[rank] if request]
            assert scheduler.lose(lost) == len(had) > 0
            numbers = [one.number for one in scheduler.queue]
            assert numbers == sorted(numbers) and all(one in scheduler.queue for one in had)
            living -= set(lost)
            continue
        tokens = ranks.run(rows)
        scheduler.accept({rank: tokens[rank] for rank in living})
        assert not any(any(scheduler.slots[rank]) for rank in {0, 1, 2, 3} - living)
    assert living == {0} and not scheduler.requests()
    for one in asked:
        one.check()


def test_a_cancelled_request_of_a_lost_rank_is_gone():
    scheduler = Scheduler(Shape(2, 1, 4))
    asked = [Asked(b"abc", 50, seed) for seed in range(2)]
    for one in asked:
        scheduler.add(one.request)
    scheduler.next_step()
    scheduler.cancel(asked[1].request)
    assert scheduler.lose([1]) == 0
    assert scheduler.requests() == [asked[0].request]


def test_a_row_of_work_has_every_field_once():
    shape = Shape(2, 3, 5)
    rows = np.arange(2 * shape.words, dtype=np.int32).reshape(2, -1)
    parts = [part.reshape(2, -1) for part in shape.split(rows)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), rows)
    rows, work = shape.empty()
    work.temperature[1, 2] = 0.25
    assert np.float32(0.25).view(np.int32) in rows[1] and not rows[0, :9].any()
    assert (shape.split(rows).position == -1).all()
