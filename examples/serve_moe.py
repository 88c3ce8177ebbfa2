"""Serves the model that examples/train_moe_lm.py has trained, over HTTP, with expert parallelism.

    python -m jax_ep launch -n 2 examples/serve_moe.py
    curl -s localhost:8000/v1/completions -d '{"prompt": "def read", "max_tokens": 60}'

Ranks are devices: several processes, several devices of one, or one.  Process 0 takes requests and
says what each step does; all processes run the same steps.  At SIGTERM the requests at hand are
finished first.  With --elastic, and launch --keep-going, the others go on when one is lost, and
take it back when it is started again (launch --restarts).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jax_ep

try:
    from moe_lm import checkpoint
    from moe_lm.model import ModelSize
    from moe_serve import front_end
    from moe_serve.decoder import AXIS, Decoder, group_config, parameters_like
    from moe_serve.engine import Balancer, Engine
    from moe_serve.placing import num_missing, place, redundant_needed
    from moe_serve.processes import REPLY_LIMIT_S, Hub, Member
    from moe_serve.ranks import Ranks, follow
    from moe_serve.work import Shape
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is missing; this example needs: pip install '.[serve]'")


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Reads a whole number from `least` on."""

    def read(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            wanted = f"at least {least}" if most is None else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"got {value}, expected {wanted}")
        return value

    read.__name__ = "whole number"  # argparse says: invalid whole number value: 'x'
    return read


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, default=Path("moe_lm_out/model"), help="folder (default %(default)s)")
    add("--host", default="127.0.0.1", help="address to listen at (default %(default)s)")
    add("--port", type=whole(0, 65535), default=8000, help="0: any free one (default %(default)s)")
    add(
        "--slots",
        type=whole(1),
        default=8,
        help="requests of a rank at a time (default %(default)s)",
    )
    add(
        "--chunk",
        type=whole(1),
        default=64,
        help="bytes of a prompt per step (default %(default)s)",
    )
    add("--window", type=whole(1), help="bytes that a byte sees (default: as in training)")
    add(
        "--max-waiting",
        type=whole(0),
        default=64,
        help="requests in the queue; more get status 429",
    )
    add("--drain-s", type=float, default=30.0, help="what SIGTERM leaves the requests at hand")
    add("--control-host", default="127.0.0.1", help="process 0's host, as the others reach it")
    add("--redundant", type=whole(0), default=0, help="expert slots beyond one for each expert")
    add(
        "--eplb-every",
        type=whole(0),
        default=0,
        help="steps, after which experts are placed by load",
    )
    add("--elastic", action="store_true", help="go on without processes that are lost")
    add("--peer-timeout-s", type=float, help="silence of a process that is lost (elastic: 5)")
    add("--node-size", type=int, help="ranks per (virtual) node")
    add("--transport", default="auto", help="between nodes: auto, loopback, shm, ...")
    add("--oracle", action="store_true", help='run with implementation="xla": jax.lax only')
    options = parser.parse_args()
    if options.elastic and options.oracle:
        parser.error("--elastic: got it with --oracle, whose collectives need all ranks")
    if options.elastic and options.peer_timeout_s is None:
        options.peer_timeout_s = 5.0
    return options


def create_group(
    options: argparse.Namespace, mesh: Mesh, size: ModelSize, shape: Shape
) -> jax_ep.Group:
    """The group of all ranks; in a process that was started again, when the others take it back."""
    config = group_config(
        size,
        shape,
        options.redundant,
        elastic=options.elastic,
        peer_timeout_s=options.peer_timeout_s,
        node_size=options.node_size,
        transport=options.transport,
    )
    implementation = "xla" if options.oracle else None
    return jax_ep.create_group(mesh, AXIS, config, implementation=implementation)


def balancer_of(options: argparse.Namespace, group: jax_ep.Group) -> Balancer | None:
    """Places by EPLB's policies, or None: experts stay where they are."""
    if not options.eplb_every and not options.elastic:
        return None
    slots = group.experts_per_rank * group.num_ranks
    return Balancer(options.eplb_every, lambda load, active: place(load, slots, active))


def warning_of(ranks: Ranks, of_process: int) -> str | None:
    """What to say at the start if experts are missing once a process, of so many ranks, is lost."""
    active = ranks.active.copy()
    if not ranks.is_elastic or of_process >= active.size:
        return None
    active[:of_process] = 0
    missing = num_missing(ranks.num_experts, ranks.num_slots, active)
    if not missing:
        return None
    left = ranks.num_experts - missing
    needed = redundant_needed(ranks.num_experts, active.size, of_process)
    return (
        f"warning: got {ranks.num_slots} expert slots, of which a lost process leaves {left}, "
        f"expected {ranks.num_experts}, one for each expert: texts will differ after a loss; pass "
        f"--redundant {needed}"
    )


def metrics_of(group: jax_ep.Group) -> Any:
    """A function that gives the group's metrics as Prometheus reads them; None: not installed."""
    try:
        import prometheus_client
    except ModuleNotFoundError:
        return None
    import jax_ep.metrics

    registry = prometheus_client.CollectorRegistry()
    jax_ep.metrics.register(group, registry)
    return lambda: prometheus_client.generate_latest(registry)


async def serve(options: argparse.Namespace, engine: Engine, group: jax_ep.Group) -> None:
    """Takes requests until a signal comes or the engine fails."""
    until, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, until.set)
    end = asyncio.Event()

    def ready(port: int) -> None:
        print(f"ready: http://{options.host}:{port}/v1/completions", flush=True)

    async def drain() -> None:
        while not until.is_set() and engine.failure is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), 0.2)
        await asyncio.to_thread(engine.drain, options.drain_s)
        end.set()

    app = front_end.FrontEnd(engine, metrics_of(group)).app()
    draining = asyncio.create_task(drain())
    await front_end.run(app, options.host, options.port, end, ready)
    await draining


def lead(
    options: argparse.Namespace, group: jax_ep.Group, ranks: Ranks, shape: Shape, hub: Hub
) -> int:
    """Process 0's part; the exit code."""
    engine = Engine(ranks, shape, hub, options.max_waiting, balancer_of(options, group))
    try:
        asyncio.run(serve(options, engine, group))
    except OSError as error:
        where = f"{options.host}:{options.port}"
        print(f"cannot listen at {where}: {error}; pass another --port", file=sys.stderr)
        return 1
    finally:
        engine.drain(0.0)  # if it could not listen, the others must end, too
        hub.close()  # before the group's close, which waits for them
    print(engine.counters.sentence())
    if engine.failure is not None:
        print(f"failed: {engine.failure}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    """Runs the server; the exit code is 1 if it failed."""
    options = parse_options()
    if not jax.distributed.is_initialized():
        jax_ep.initialize()
    is_first = jax.process_index() == 0
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    shape = Shape(mesh.size, options.slots, options.chunk)
    trained = checkpoint.load_sizes(options.model)
    size = trained.size
    if is_first:
        print(f"loading {options.model}, compiling the step for {mesh.size} ranks", flush=True)
    # Before anybody waits for this process: it may be one that the others take back.
    parameters = checkpoint.load_parameters(options.model, *parameters_like(size))
    with contextlib.ExitStack() as stack:
        if is_first:
            reply_limit_s = options.peer_timeout_s if options.elastic else REPLY_LIMIT_S
            hub = stack.enter_context(contextlib.closing(Hub(options.control_host, reply_limit_s)))
        else:
            link = stack.enter_context(contextlib.closing(Member(options.control_host)))
        group = stack.enter_context(create_group(options, mesh, size, shape))
        decoder = Decoder(mesh, group, size, shape, options.window or trained.length)
        ranks = Ranks(decoder, group, *parameters)
        if is_first:
            if warning := warning_of(ranks, jax.local_device_count()):
                print(warning, file=sys.stderr, flush=True)
            return lead(options, group, ranks, shape, hub)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # process 0 says when to stop
        with contextlib.closing(link):  # before the group: its close waits for process 0
            follow(ranks, link, size.layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
