"""Answers of other processes, of which some came too late to be read."""

import socket

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

from moe_serve import frames, processes
from moe_serve.frames import Kind, LostProcessError
from moe_serve.processes import FailedStepError, Hub


@pytest.fixture
def pair(monkeypatch):
    """Process 0's end, without a job, and the socket of process 1."""
    monkeypatch.setattr(processes.jax, "process_count", lambda: 1)
    hub, (ours, theirs) = Hub("127.0.0.1"), socket.socketpair()
    ours.settimeout(5.0)
    hub._others[1] = ours
    with theirs:
        yield (
            hub,
            lambda kind, *words: frames.send(theirs, kind, np.array(words, np.int32).tobytes()),
        )
    hub.close()


def test_what_was_answered_before_an_agreement_is_skipped(pair):
    hub, answer = pair
    # Of two attempts whose answers were not read, and of a step that all have gone back from.
    for kind, *words in [
        (Kind.AGREE, 1),
        (Kind.LOAD, 7),
        (Kind.STEP, 66),
        (Kind.AGREE, 2),
        (Kind.LOAD, 8),
        (Kind.STEP, 67),
    ]:
        answer(kind, *words)
    assert hub.collect(Kind.AGREE, 2)[1].tolist() == [2]
    assert hub.collect(Kind.LOAD)[1].tolist() == [8]
    assert hub.collect(Kind.STEP)[1].tolist() == [67]


def test_a_failed_step_is_said_and_the_next_answer_is_read(pair):
    hub, answer = pair
    answer(Kind.FAILED)
    answer(Kind.AGREE, 1)
    with pytest.raises(FailedStepError, match="process 1"):
        hub.collect(Kind.STEP)
    assert hub.collect(Kind.AGREE, 1)[1].tolist() == [1]


def test_who_has_gone_is_lost_and_asked_no_more(pair):
    hub, _ = pair
    hub._others[1].shutdown(socket.SHUT_RDWR)
    with pytest.raises(LostProcessError, match="process 1 is lost"):
        hub.collect(Kind.AGREE, 1)
    assert hub.collect(Kind.STEP) == {}
