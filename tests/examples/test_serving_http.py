"""The HTTP front end and the engine's loop, with a model of one line behind them."""

import asyncio
import json
import threading

import numpy as np
import pytest
from fake_model import ENDLESS, FakeRanks, completion

pytest.importorskip("aiohttp")
pytest.importorskip("flax")

from aiohttp.test_utils import TestClient, TestServer
from moe_serve import front_end
from moe_serve.engine import Balancer, Engine
from moe_serve.work import Shape

PATH = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 4096, "seed": ENDLESS}


class NoOthers:
    """Process 0's connections where there is one process."""

    def __init__(self):
        self.sent = []

    def send(self, kind, payload=b""):
        self.sent.append(kind.name)

    def collect(self, kind, number=None):
        return {}


class SlowRanks(FakeRanks):
    """Steps wait while `gate` is closed."""

    def __init__(self, shape):
        super().__init__(shape)
        self.gate = threading.Event()
        self.gate.set()
        self.slots = []

    is_elastic = False
    active = np.ones(1, np.int32)

    def read_load(self):
        return np.array([[1, 2]], np.int32) * (len(self.slots) + 1)

    def place(self, slots):
        self.slots.append(slots.tolist())

    def run(self, rows):
        assert self.gate.wait(20)
        return super().run(rows)


def served(scenario, slots=2, max_waiting=2, metrics=None, balancer=None):
    """Runs `scenario(client, engine, ranks)` against a server; returns what the hub was told."""

    async def run():
        shape = Shape(1, slots, 8)
        ranks, hub = SlowRanks(shape), NoOthers()
        engine = Engine(ranks, shape, hub, max_waiting, balancer)
        app = front_end.FrontEnd(engine, metrics).app()
        server = TestServer(app, handler_cancellation=True)
        async with TestClient(server) as client:
            await asyncio.wait_for(scenario(client, engine, ranks), 30)
        ranks.gate.set()
        await asyncio.to_thread(engine.drain, 0.0)
        return hub.sent

    return asyncio.run(run())


def written(seed, prompt, max_tokens):
    text, finish = completion(prompt, seed, max_tokens)
    return text.decode(errors="replace"), finish


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within 10 s")


def test_a_completion_has_its_text_its_end_and_its_usage():
    async def scenario(client, engine, ranks):
        for seed in range(5):
            body = {"prompt": "def f", "max_tokens": 30, "seed": seed, "model": "any", "n": 1}
            answer = await client.post(PATH, json=body)
            assert answer.status == 200
            found = await answer.json()
            choice = found["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == written(seed, b"def f", 30)
            count = len(completion(b"def f", seed, 30)[0])
            assert found["usage"] == {
                "prompt_tokens": 5,
                "completion_tokens": count,
                "total_tokens": 5 + count,
            }
            assert found["object"] == "text_completion" and found["id"].startswith("cmpl-")

    sent = served(scenario)
    assert sent[-1] == "STOP" and set(sent[:-1]) <= {"STEP", "IDLE"}


def test_a_stream_is_the_same_text_in_parts():
    async def scenario(client, engine, ranks):
        body = {"prompt": "é = ", "max_tokens": 40, "seed": 7, "stream": True}
        answer = await client.post(PATH, json=body)
        assert answer.headers["Content-Type"] == "text/event-stream"
        lines = (await answer.text()).split("\n\n")
        assert all(line.startswith("data: ") for line in lines[:-1]) and lines[-1] == ""
        assert lines[-2] == "data: [DONE]"
        parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        text = "".join(part["choices"][0]["text"] for part in parts)
        finish = parts[-1]["choices"][0]["finish_reason"]
        assert (text, finish) == written(7, "é = ".encode(), 40)
        assert [part["choices"][0]["finish_reason"] for part in parts[:-1]] == [None] * (
            len(parts) - 1
        )
        assert len(parts) > 5 and "usage" in parts[-1]

    served(scenario)


BAD = [
    ({}, "prompt: got NoneType, expected a string"),
    ({"prompt": ["a"]}, "prompt: got list, expected a string"),
    ({"prompt": "x" * 70_000}, "prompt: got 70000 bytes, expected at most 65536"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens: got 0, expected a whole number from 1 to 4096"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens: got True"),
    ({"prompt": "a", "temperature": "hot"}, "temperature: got 'hot', expected a number from 0"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature: got nan"),
    ({"prompt": "a", "seed": -1}, "seed: got -1"),
    ({"prompt": "a", "seed": 1.5}, "seed: got 1.5, expected a whole number"),
    ({"prompt": "a", "stream": "yes"}, "stream: got 'yes', expected true or false"),
    ({"prompt": "a", "n": 2}, "n: got 2, expected 1"),
    ({"prompt": "a", "logit_bias": {}}, "got unknown fields ['logit_bias'], expected prompt"),
    ([1], "body: got list, expected a JSON object"),
]


def test_bad_requests_are_refused_with_a_sentence():
    async def scenario(client, engine, ranks):
        for body, sentence in BAD:
            answer = await client.post(PATH, data=json.dumps(body))
            assert answer.status == 400, body
            error = (await answer.json())["error"]
            assert sentence in error["message"] and error["type"] == "invalid_request_error"
        for data in (b"", b"{", b"\xff\xfe"):
            answer = await client.post(PATH, data=data)
            assert answer.status == 400
            assert "expected a JSON object" in (await answer.json())["error"]["message"]
        answer = await client.post(PATH, data=b"[" * 100_000)  # deeper than Python's stack
        assert answer.status == 400
        answer = await client.post(PATH, data=b" " * ((1 << 20) + 1))
        assert answer.status == 413
        assert "at most those" in (await answer.json())["error"]["message"]
        assert engine.counters.tokens == 0

    served(scenario)


def test_more_requests_than_the_queue_takes_get_429():
    async def scenario(client, engine, ranks):
        ranks.gate.clear()
        asked = [asyncio.create_task(client.post(PATH, json=LONG | {"max_tokens": 3}))]
        await until(lambda: engine._scheduler.num_running == 1)  # its step waits at the gate
        for waiting in (1, 2):
            asked.append(asyncio.create_task(client.post(PATH, json=LONG | {"max_tokens": 3})))
            await until(lambda n=waiting: len(engine._scheduler.queue) == n)
        answer = await client.post(PATH, json=LONG)
        assert answer.status == 429 and answer.headers["Retry-After"] == "1"
        assert "2 requests wait already" in (await answer.json())["error"]["message"]
        ranks.gate.set()
        assert [(await one).status for one in asked] == [200] * 3

    served(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_slot(stream):
    async def scenario(client, engine, ranks):
        ranks.gate.clear()
        asked = asyncio.create_task(client.post(PATH, json=LONG | {"stream": stream}))
        await until(lambda: engine.occupancy()[0] == 1)
        if stream:
            (await asked).close()
        else:
            asked.cancel()
        await until(lambda: all(one.is_cancelled for one in engine._scheduler.requests()))
        ranks.gate.set()
        await until(lambda: engine.occupancy() == (0, 0))
        assert engine.counters.tokens <= 1  # of the step that waited at the gate

    served(scenario)


def test_health_metrics_and_unknown_paths():
    async def scenario(client, engine, ranks):
        assert (await (await client.get("/health")).json())["status"] == "ok"
        assert (await client.get(PATH)).status == 405
        assert (await client.get("/v2")).status == 404
        found = await client.get("/metrics")
        assert found.status == 200 and await found.text() == "a 1\n"

    served(scenario, metrics=lambda: b"a 1\n")

    async def without(client, engine, ranks):
        assert (await client.get("/metrics")).status == 404

    served(without)


def test_a_lost_rank_is_told_to_whoever_waits_and_whoever_comes():
    async def scenario(client, engine, ranks):
        ranks.gate.clear()
        whole = asyncio.create_task(client.post(PATH, json=LONG))
        stream = asyncio.create_task(client.post(PATH, json=LONG | {"stream": True}))
        await until(lambda: sum(engine.occupancy()) == 2)
        ranks.failure = RuntimeError("rank 1 is lost")
        ranks.gate.set()
        assert (await whole).status == 503
        text = await (await stream).text()
        assert "rank 1 is lost" in text and "[DONE]" not in text
        assert (await client.get("/health")).status == 503
        answer = await client.post(PATH, json=LONG)
        assert answer.status == 503
        assert "rank 1 is lost" in (await answer.json())["error"]["message"]

    served(scenario)


def test_draining_finishes_what_runs_and_refuses_what_comes():
    async def scenario(client, engine, ranks):
        ranks.gate.clear()
        asked = asyncio.create_task(client.post(PATH, json=LONG | {"max_tokens": 20}))
        await until(lambda: engine.occupancy()[0] == 1)
        draining = asyncio.create_task(asyncio.to_thread(engine.drain, 20))
        await until(lambda: engine._is_draining)
        assert (await client.post(PATH, json=LONG)).status == 503
        ranks.gate.set()
        assert (await asked).status == 200
        await draining

    served(scenario)


def test_draining_ends_after_its_limit():
    async def scenario(client, engine, ranks):
        ranks.gate.clear()
        stream = await client.post(PATH, json=LONG | {"stream": True})
        draining = asyncio.create_task(asyncio.to_thread(engine.drain, 0.1))
        text = await stream.text()
        assert "the server is shutting down" in text.splitlines()[-2]
        ranks.gate.set()
        await draining

    served(scenario)


def test_experts_are_placed_by_the_load_of_the_steps_before():
    placed = []

    def place(load, active):
        assert active.tolist() == [1]
        placed.append(load.copy())
        return load + 1

    async def scenario(client, engine, ranks):
        answer = await client.post(PATH, json=LONG | {"max_tokens": 50})
        assert answer.status == 200
        # One byte is the chunk's; a step more to take the last one is not needed.
        assert engine.counters.placements == len(placed) == 5

    sent = served(scenario, balancer=Balancer(10, place))
    # What was chosen before counts half.
    assert [load.tolist() for load in placed] == [
        [[1, 2]],
        [[2, 5]],
        [[4, 8]],
        [[6, 12]],
        [[8, 16]],
    ]
    assert sent.count("LOAD") == sent.count("PLACE") == 5
    at = sent.index("LOAD")
    assert sent[at : at + 2] == ["LOAD", "PLACE"] and sent[:at].count("STEP") == 11  # one warms up
