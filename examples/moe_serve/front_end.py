"""HTTP in front of the engine: completions as OpenAI's API has them, health, metrics.

Bytes are tokens: usage counts bytes, and text is what they decode to as UTF-8.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from moe_serve.engine import ClosedError, Engine, QueueFullError
from moe_serve.scheduler import Finish, Request

MODEL = "moe_lm"
MAX_BODY = 1 << 20
MAX_PROMPT = 1 << 16  # bytes
MAX_TOKENS = 4096
MAX_TEMPERATURE = 2.0
MAX_SEED = (1 << 31) - 1
DEFAULTS: dict[str, Any] = {"max_tokens": 64, "temperature": 0.3, "seed": None, "stream": False}
IGNORED = {"model", "user", "n", "stream_options"}  # clients send them; n must be 1


class BadRequestError(ValueError):
    """What the client sent makes no request; the text says why."""


class Completion:
    """One request, as the event loop sees it."""

    def __init__(self, body: dict[str, Any]) -> None:
        """Checks the JSON body; BadRequestError says what was got and expected."""
        unknown = body.keys() - DEFAULTS.keys() - IGNORED - {"prompt"}
        if unknown:
            known = ", ".join(["prompt", *DEFAULTS])
            raise BadRequestError(f"got unknown fields {sorted(unknown)!s:.80}, expected {known}")
        if body.get("n", 1) != 1:
            raise BadRequestError(f"n: got {body['n']!r:.40}, expected 1")
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise BadRequestError(f"prompt: got {type(prompt).__name__}, expected a string")
        self.prompt = prompt.encode(errors="replace")
        if len(self.prompt) > MAX_PROMPT:
            got = f"prompt: got {len(self.prompt)} bytes"
            raise BadRequestError(f"{got}, expected at most {MAX_PROMPT}")
        given = DEFAULTS | {name: value for name, value in body.items() if value is not None}
        max_tokens = _number("max_tokens", given["max_tokens"], 1, MAX_TOKENS, int)
        temperature = _number("temperature", given["temperature"], 0, MAX_TEMPERATURE, float)
        seed = secrets.randbelow(MAX_SEED + 1) if given["seed"] is None else given["seed"]
        seed = _number("seed", seed, 0, MAX_SEED, int)
        if not isinstance(given["stream"], bool):
            raise BadRequestError(f"stream: got {given['stream']!r:.40}, expected true or false")
        self.stream: bool = given["stream"]
        self._events: asyncio.Queue[int | Finish | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(event: int | Finish | Exception) -> None:
            loop.call_soon_threadsafe(self._events.put_nowait, event)

        self.request = Request(self.prompt, max_tokens, temperature, seed, deliver)
        self.num_written = 0
        self._head = {
            "id": f"cmpl-{secrets.token_hex(8)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": MODEL,
        }

    async def parts(self) -> AsyncIterator[tuple[str, Finish | None]]:
        """Text as it comes; the last part says how it ended. Raises the engine's error."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while True:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, str):
                yield decoder.decode(b"", final=True), event
                return
            self.num_written += 1
            if text := decoder.decode(bytes([event])):
                yield text, None

    def body(self, text: str, finish: Finish | None, **more: Any) -> dict[str, Any]:
        """The JSON of an answer, or of a part of one."""
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}
        return {**self._head, "choices": [choice], **more}

    def usage(self) -> dict[str, int]:
        """Bytes, under the names that clients know."""
        given, written = len(self.prompt), self.num_written
        return {
            "prompt_tokens": given,
            "completion_tokens": written,
            "total_tokens": given + written,
        }


def _number(name: str, value: Any, least: float, most: float, kind: type) -> Any:
    is_number = isinstance(value, (int, float) if kind is float else int)
    if not is_number or isinstance(value, bool) or not least <= value <= most:
        what = "a number" if kind is float else "a whole number"
        raise BadRequestError(f"{name}: got {value!r:.40}, expected {what} from {least} to {most}")
    return kind(value)


def _error(status: int, text: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    body = {"error": {"message": text, "type": kind}}
    return web.json_response(body, status=status, headers=headers)


class FrontEnd:
    """The handlers.

    Args:
        engine: that runs the requests.
        metrics: what GET /metrics answers, or None where prometheus_client is missing.
    """

    def __init__(self, engine: Engine, metrics: Any = None) -> None:
        self._engine, self._metrics = engine, metrics

    def app(self) -> web.Application:
        """What aiohttp serves; run it with `handler_cancellation=True`."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        return app

    async def complete(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        try:
            body = json.loads(await http.read())
            if not isinstance(body, dict):
                raise BadRequestError(f"body: got {type(body).__name__}, expected a JSON object")
            completion = Completion(body)
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"body: got more than {MAX_BODY} bytes, expected at most those")
        except BadRequestError as error:
            return _error(400, str(error))
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or too deep
            return _error(400, f"body: expected a JSON object; {error}")
        try:
            self._engine.submit(completion.request)
        except QueueFullError as error:
            return _error(429, str(error))
        except ClosedError as error:
            return _error(503, str(error))
        try:
            if completion.stream:
                return await self._stream(http, completion)
            parts = [part async for part in completion.parts()]
            text, finish = "".join(text for text, _ in parts), parts[-1][1]
            return web.json_response(completion.body(text, finish, usage=completion.usage()))
        except ClosedError as error:
            return _error(503, str(error))
        finally:
            self._engine.cancel(completion.request)  # the client may have hung up

    async def _stream(self, http: web.Request, completion: Completion) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(http)
        last = None
        try:
            async for part, finish in completion.parts():
                more = {} if finish is None else {"usage": completion.usage()}
                await _send_event(response, json.dumps(completion.body(part, finish, **more)))
            last = "[DONE]"
        except ClosedError as error:  # the status line is sent already
            last = json.dumps({"error": {"message": str(error), "type": "server_error"}})
        except ConnectionResetError:  # the client has hung up
            return response
        await _send_event(response, last)
        await response.write_eof()
        return response

    async def health(self, http: web.Request) -> web.Response:
        """GET /health: 200 while requests are taken."""
        engine = self._engine
        running, waiting = engine.occupancy()
        status = "ok" if engine.failure is None else f"failed: {engine.failure}"
        body = {"status": status, "running": running, "waiting": waiting}
        body |= vars(engine.counters)
        return web.json_response(body, status=200 if engine.failure is None else 503)

    async def metrics(self, http: web.Request) -> web.Response:
        """GET /metrics: process 0's group, for Prometheus."""
        if self._metrics is None:
            return _error(404, "prometheus_client is missing; pip install '.[serve,metrics]'")
        text = await asyncio.to_thread(self._metrics)  # a scrape may wait for the group
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})


async def _send_event(response: web.StreamResponse, data: str) -> None:
    await response.write(f"data: {data}\n\n".encode())


async def run(app: web.Application, host: str, port: int, until: asyncio.Event, ready: Any) -> None:
    """Serves until the event is set, then ends what is open.

    `ready` is called with the port once it is open.
    """
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=5.0, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        ready(runner.addresses[0][1])
        await until.wait()
    finally:
        await runner.cleanup()
