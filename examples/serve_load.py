"""Asks a server for many completions at random times, and says how long its answers took.

    python examples/serve_load.py [--rate 8] [--requests 100]

Works with every server of OpenAI-style completions that streams; examples/serve_moe.py is one.
Arrivals are a Poisson process; prompts are pieces of the standard library that the model was not
trained on.  Both follow from --seed.  Text is counted in bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

try:
    import aiohttp
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker
    from moe_lm import text_data
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is missing; this example needs: pip install '.[serve]'")

PERCENTILES = (50, 90, 99)


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server (default %(default)s)")
    add("--rate", type=float, default=8.0, help="requests per second (default %(default)s)")
    add("--requests", type=int, default=100, help="how many (default %(default)s)")
    add("--prompt", type=int, nargs=2, default=(8, 200), metavar=("LEAST", "MOST"), help="bytes")
    add("--write", type=int, nargs=2, default=(16, 128), metavar=("LEAST", "MOST"), help="bytes")
    add("--temperature", type=float, default=0.3)
    add("--seed", type=int, default=0)
    add("--limit-s", type=float, default=120.0, help="of one request (default %(default)s)")
    add("--out", type=Path, default=Path("serve_load_out"), help="folder of the JSON and the plot")
    return parser.parse_args()


@dataclasses.dataclass
class Answer:
    """What one request met; seconds since it was sent."""

    status: int
    arrival_s: float  # of the run
    first_s: float = 0.0
    whole_s: float = 0.0
    gaps_s: list[float] = dataclasses.field(default_factory=list)  # between parts of text
    num_bytes: int = 0


def make_requests(options: argparse.Namespace) -> list[tuple[float, dict[str, Any]]]:
    """(seconds after the start, body) of every request: a function of the options."""
    rng = np.random.default_rng(options.seed)
    text = text_data.load_standard_library().held_out
    arrivals = np.cumsum(rng.exponential(1 / options.rate, options.requests))
    requests = []
    for number, arrival in enumerate(arrivals):
        length = int(rng.integers(options.prompt[0], options.prompt[1] + 1))
        begin = int(rng.integers(0, text.size - length))
        body = {
            "prompt": text_data.readable(text[begin : begin + length]) or "import ",
            "max_tokens": int(rng.integers(options.write[0], options.write[1] + 1)),
            "temperature": options.temperature,
            "seed": number,
            "stream": True,
        }
        requests.append((float(arrival), body))
    return requests


async def ask(
    session: aiohttp.ClientSession, url: str, begin: float, arrival: float, body: dict[str, Any]
) -> Answer:
    """Sends one request when its time has come, and reads what streams back."""
    await asyncio.sleep(max(0.0, begin + arrival - time.monotonic()))
    sent = last = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = Answer(response.status, sent - begin)
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            part = json.loads(line.removeprefix(b"data: "))
            if "error" in part:
                answer.status = 503
                break
            text = part["choices"][0]["text"]
            if not text:
                continue
            now = time.monotonic()
            if answer.num_bytes:
                answer.gaps_s.append(now - last)
            else:
                answer.first_s = now - sent
            answer.num_bytes += len(text.encode())
            last = now
        answer.whole_s = time.monotonic() - sent
    return answer


async def run(options: argparse.Namespace) -> tuple[list[Answer], float]:
    """All answers, and the seconds from the first request to the last answer."""
    requests = make_requests(options)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=options.limit_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        begin = time.monotonic()
        answers = await asyncio.gather(
            *(ask(session, options.url, begin, arrival, body) for arrival, body in requests)
        )
        return answers, time.monotonic() - begin


def summarise(answers: list[Answer], seconds: float) -> dict[str, Any]:
    """The figures that are printed and kept."""
    good = [answer for answer in answers if answer.status == 200]
    if not any(answer.num_bytes for answer in good):
        statuses = sorted({answer.status for answer in answers})
        sys.exit(f"no request was answered with text (status {statuses})")

    def percentiles(values: list[float]) -> dict[str, float]:
        found = np.percentile(values, PERCENTILES)
        return {f"p{p}": float(ms) for p, ms in zip(PERCENTILES, found * 1e3, strict=True)}

    return {
        "requests": len(answers),
        "answered": len(good),
        "seconds": seconds,
        "tokens_per_s": sum(answer.num_bytes for answer in good) / seconds,
        "first_token_ms": percentiles([answer.first_s for answer in good if answer.num_bytes]),
        "per_token_ms": percentiles([gap for answer in good for gap in answer.gaps_s]),
        "whole_answer_ms": percentiles([answer.whole_s for answer in good]),
    }


def draw(answers: list[Answer], figures: dict[str, Any], path: Path) -> None:
    """How long first and later tokens took, as shares of all, and the requests over time."""
    good = [answer for answer in answers if answer.status == 200 and answer.num_bytes]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), constrained_layout=True)
    series = {
        "time to first token": [answer.first_s for answer in good],
        "time per token": [gap for answer in good for gap in answer.gaps_s],
    }
    for axis, (title, values), name in zip(
        axes, series.items(), ("first_token_ms", "per_token_ms"), strict=False
    ):
        ordered = np.sort(values) * 1e3
        axis.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), color="tab:green")
        for percentile, ms in figures[name].items():
            axis.axvline(ms, color="0.7", linewidth=0.8)
            axis.text(ms, 0.02, f" {percentile} {ms:.1f}", rotation=90, fontsize=8, color="0.4")
        axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        axis.set(title=title, xlabel="ms", ylabel="share of all", xscale="log", ylim=(0, 1.02))
    for row, answer in enumerate(good):
        axes[2].plot([answer.arrival_s, answer.arrival_s + answer.first_s], [row] * 2, "tab:orange")
        span = [answer.arrival_s + answer.first_s, answer.arrival_s + answer.whole_s]
        axes[2].plot(span, [row] * 2, "tab:green", linewidth=0.8)
    axes[2].set(title="requests: waiting, writing", xlabel="seconds", ylabel="request")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    """Runs the load; the exit code is 1 if a request was not answered."""
    options = parse_options()
    answers, seconds = asyncio.run(run(options))
    figures = summarise(answers, seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    given = {name: value for name, value in vars(options).items() if name not in ("out", "url")}
    (options.out / "serve_load.json").write_text(
        json.dumps({"options": given, **figures}, indent=1) + "\n"
    )
    draw(answers, figures, options.out / "serve_load.png")
    print(f"{figures['answered']} of {figures['requests']} requests in {seconds:.1f} s")
    print(f"{figures['tokens_per_s']:,.0f} tokens/s")
    for name in ("first_token_ms", "per_token_ms", "whole_answer_ms"):
        values = "  ".join(f"{p} {ms:8.2f} ms" for p, ms in figures[name].items())
        print(f"{name.removesuffix('_ms').replace('_', ' '):14s} {values}")
    print(f"serve_load.json and serve_load.png are in {options.out}")
    return 0 if figures["answered"] == figures["requests"] else 1


if __name__ == "__main__":
    sys.exit(main())
