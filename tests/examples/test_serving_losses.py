"""The engine's loop where other processes are lost, with a model of one line behind it."""

import copy
import itertools
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from fake_model import FakeRanks, completion

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

from moe_serve import engine as engine_module
from moe_serve.engine import MOST_TRIES, Balancer, Engine
from moe_serve.frames import Kind, LostProcessError
from moe_serve.processes import FailedStepError
from moe_serve.scheduler import Request
from moe_serve.work import Shape

LIMIT_S = 20


class Job:
    """Three processes of a rank each: what process 0 sees of them, as its ranks and its hub.

    Args:
        losses: (step, where it is noticed, process that is lost or None), one after the other.
        returns: (step, process), which is started again by then, and asks to be taken back a step
            later.
    """

    is_elastic, num_experts, num_slots = True, 2, 6

    def __init__(self, shape, losses, returns=()):
        self.returns, self.back = list(returns), None
        self.model, self.losses = FakeRanks(shape), iter(losses)
        self.coming, self.gone = next(self.losses, None), None
        self.active = np.ones(3, np.int32)
        self.num_steps, self.before, self.tokens, self.places = 0, None, {}, 0
        self.has_forgotten = threading.Event()
        self.told, self.forgotten = [], []  # kinds of frames, processes

    def fail(self, where, error, step=None):
        """Raises if the next loss is noticed here, in the step at hand."""
        at = self.num_steps if step is None else step
        if self.coming is not None and self.coming[:2] == (at, where):
            process, self.coming = self.coming[2], next(self.losses, None)
            self.gone = process
            raise error(f"process {process} is lost")

    # As Ranks.

    def run(self, rows):
        self.fail("run", RuntimeError)
        self.before = copy.deepcopy(self.model.cache)
        self.tokens = self.model.run(rows)
        self.num_steps += 1
        return {0: self.tokens[0]}

    def agree(self, num_steps):
        if self.gone is not None:
            self.active[self.gone], self.gone = 0, None
        if self.back is not None:
            self.active[self.back], self.back = 1, None
        if self.num_steps == num_steps + 1:
            self.model.cache, self.num_steps = self.before, num_steps
        assert self.num_steps == num_steps

    def readmit(self, rank):
        assert not self.active[rank]
        if self.num_steps <= self.returns[0][0]:
            return False
        self.back = rank
        self.model.cache[rank] = [bytearray() for _ in self.model.cache[rank]]
        return True

    def place(self, slots):
        assert set(slots[0].tolist()) == set(self.active.tolist())
        self.places += 1

    def read_load(self):
        return np.ones((1, 2), np.int32)

    # As Hub.

    def send(self, kind, payload=b""):
        self.told.append(kind)
        if kind == Kind.STEP:
            self.fail("send", LostProcessError)
        if kind == Kind.IDLE:
            self.fail("idle", LostProcessError)

    def collect(self, kind, number=None):
        if kind == Kind.STEP:
            self.fail("collect", LostProcessError, self.num_steps - 1)
            self.fail("elsewhere", FailedStepError, self.num_steps - 1)
            return {p: self.tokens[p] for p in (1, 2) if self.active[p]}
        if kind == Kind.AGREE:
            self.fail("agree", LostProcessError)
        return {}

    def waiting(self):
        return [p for step, p in self.returns[:1] if self.num_steps >= step]

    def take(self, process):
        assert self.returns.pop(0)[1] == process and self.active[process]

    def tell(self, process, kind, payload):
        assert kind == Kind.WELCOME
        assert np.frombuffer(payload, np.int32)[0] == self.num_steps
        self.fail("welcome", LostProcessError)

    def forget(self, processes):
        self.gone = next((p for p in processes if self.active[p]), self.gone)  # its older life
        self.forgotten += processes
        self.has_forgotten.set()


def serve(monkeypatch, losses, waits_for_loss=False, returns=()):
    """Texts of nine requests, the engine and the job."""
    devices = [SimpleNamespace(process_index=process) for process in range(3)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    shape = Shape(3, 2, 4)
    job = Job(shape, losses, returns)
    balancer = Balancer(0, lambda load, active: np.tile(active, (1, 2)))
    engine = Engine(job, shape, job, 64, balancer)
    if waits_for_loss:
        assert job.has_forgotten.wait(LIMIT_S)
    events, done = [[] for _ in range(9)], threading.Semaphore(0)
    for seed, of_request in enumerate(events):

        def deliver(event, of_request=of_request):
            of_request.append(event)
            if not isinstance(event, int):
                done.release()

        engine.submit(Request(b"some text", 60, 0.0, seed, deliver))
    assert all(done.acquire(timeout=LIMIT_S) for _ in events)
    engine.drain(LIMIT_S)
    return events, engine, job


def check(events):
    for seed, of_request in enumerate(events):
        assert (bytes(of_request[:-1]), of_request[-1]) == completion(b"some text", seed, 60)


@pytest.mark.parametrize("where", ["send", "run", "collect", "elsewhere"])
def test_texts_stay_the_same_wherever_a_loss_is_noticed(monkeypatch, capsys, where):
    events, engine, job = serve(monkeypatch, [(5, where, 2)])
    check(events)
    assert engine.failure is None and job.forgotten == [2] and job.places == 1
    assert (engine.counters.lost_processes, engine.counters.moved_requests) == (1, 2)
    said = capsys.readouterr().out
    assert "lost process 2 (ranks [2]): 2 of 3 ranks go on, agreed after 0.0" in said
    assert "2 requests move to them, 0 experts of each layer are missing" in said
    assert "processes lost: 1, requests moved: 2, " in engine.counters.sentence()


def test_another_process_is_lost_while_the_living_agree(monkeypatch):
    events, engine, job = serve(monkeypatch, [(5, "run", 2), (5, "agree", 1)])
    check(events)
    assert job.forgotten == [2, 1] and job.places == 1
    assert (engine.counters.lost_processes, engine.counters.moved_requests) == (2, 4)


def test_a_process_is_lost_while_there_is_nothing_to_do(monkeypatch):
    monkeypatch.setattr(engine_module, "IDLE_S", 0.01)
    events, engine, job = serve(monkeypatch, [(1, "idle", 1)], waits_for_loss=True)
    check(events)
    assert job.forgotten == [1] and engine.counters.moved_requests == 0


def test_a_process_that_was_only_slow_stays(monkeypatch, capsys):
    events, engine, job = serve(monkeypatch, [(5, "elsewhere", None), (9, "run", None)])
    check(events)
    assert not job.forgotten and engine.counters.moved_requests == 0
    assert capsys.readouterr().out.count("a step is repeated, nobody is lost") == 2


def test_a_failure_that_stays_is_no_loss_and_ends_the_server(monkeypatch):
    events, engine, job = serve(monkeypatch, itertools.repeat((5, "run", None)))
    assert "is lost" in str(engine.failure) and not job.forgotten
    assert all(isinstance(of_request[-1], Exception) for of_request in events)
    assert job.told.count(Kind.AGREE) == MOST_TRIES


def test_a_process_that_is_started_again_is_taken_back(monkeypatch, capsys):
    events, engine, job = serve(monkeypatch, [(5, "run", 2)], returns=[(8, 2)])
    check(events)
    assert job.forgotten == [2] and job.active.tolist() == [1, 1, 1] and job.places == 2
    assert (engine.counters.lost_processes, engine.counters.returned_processes) == (1, 1)
    said = capsys.readouterr().out
    assert "process 2 (ranks [2]) is back: 3 of 3 ranks go on, agreed after 0.0" in said
    assert "is repeated" not in said


def test_a_process_is_taken_back_whose_end_nobody_has_noticed(monkeypatch):
    """It waits at the door before its connection, or a step, says that it has ended."""
    events, engine, job = serve(monkeypatch, [], returns=[(5, 2)])
    check(events)
    assert job.active.tolist() == [1, 1, 1] and job.places == 2
    assert (engine.counters.lost_processes, engine.counters.returned_processes) == (1, 1)


def test_a_process_dies_while_it_is_taken_back(monkeypatch):
    events, engine, job = serve(monkeypatch, [(5, "run", 2), (9, "welcome", 2)], returns=[(8, 2)])
    check(events)
    assert engine.failure is None and job.active.tolist() == [1, 1, 0]
    assert (engine.counters.lost_processes, engine.counters.returned_processes) == (2, 1)
