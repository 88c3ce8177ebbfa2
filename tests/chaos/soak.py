"""Keeps processes at work for a long time and looks whether anything grows in them.

    python tests/chaos/soak.py --minutes 30 [--seed 0] [--out DIR]

Three things run side by side until the time is over:
  one    a process of four ranks: groups of random shapes are made, used, checked, and closed
  many   the same in a job of three processes, of which one is stopped now and then for less than
         peer_timeout_s
  chaos  episodes of world.py, in which processes are killed
and a process `control`, which does what `one` does with implementation="xla": its growth is JAX's.

When no group is open, each process of `one` and `many` must have as many descriptors and threads,
and as much shared memory, as after its first rounds. Its resident memory may grow by RSS_BOUND more
than control's does in as many rounds. (JAX's caches are cleared and free memory is given back
before it is looked at.) What the runs have measured goes to DIR/soak.json and DIR/soak.png.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).parent
WARM_UP = 12  # rounds, in which JAX starts its threads and opens its files
LOOK_EVERY = 4  # rounds
LEAST_LOOKS = 4  # after the warm-up: the first, and three to hold against it
RSS_BOUND = (
    64 << 10
)  # bytes a round: a leaked descriptor's buffers or a heap's page tables are less
RSS_ROUNDS = 200  # fewer say nothing about memory
# gRPC's pool, in JAX's coordinator: it takes another thread when it is starved of cores.
ELASTIC_THREADS = ("event_engine",)
PAUSE_S = (0.2, 1.5)
PEER_TIMEOUT_S = 10.0
END_S = 120.0  # that a round may take after the time is over


# ---- What a process does ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Round:
    """One group and its calls; equal on all processes."""

    tokens: int
    hidden: int
    experts_per_rank: int
    top_k: int
    mode: str
    dtype: str
    node_size: int
    max_in_flight: int
    steps: int
    seed: int

    @staticmethod
    def draw(rng: random.Random, num_ranks: int) -> Round:
        sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
        experts = rng.randint(1, 5)
        return Round(
            tokens=rng.choice((1, 3, 8, 33, 100)),
            hidden=rng.choice((8, 16, 64, 256)),
            experts_per_rank=experts,
            top_k=rng.randint(1, min(4, experts * num_ranks)),
            mode=rng.choice(("ht", "ll")),
            dtype=rng.choice(("float32", "bfloat16")),
            node_size=rng.choice(sizes),
            max_in_flight=rng.choice((2, 4)),
            steps=rng.randint(1, 6),
            seed=rng.getrandbits(31),
        )


def _play(play, mesh, implementation):
    """One round; raises AssertionError if a value or a gradient is wrong."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_ep

    num_ranks = mesh.size
    config = jax_ep.Config(
        num_experts=play.experts_per_rank * num_ranks,
        top_k=play.top_k,
        hidden=play.hidden,
        max_tokens=play.tokens,
        dtype=getattr(jnp, play.dtype),
        mode=play.mode,
        node_size=play.node_size,
        max_in_flight=play.max_in_flight,
        timeout_s=60,
        peer_timeout_s=PEER_TIMEOUT_S,
    )
    rng = np.random.default_rng(play.seed)
    rows = num_ranks * play.tokens
    scales = rng.uniform(0.5, 2.0, config.num_experts).astype(np.float32)
    x = rng.standard_normal((rows, play.hidden)).astype(np.float32)
    ids = np.stack([rng.permutation(config.num_experts)[: play.top_k] for _ in range(rows)])
    ids = ids.astype(np.int32)
    weights = rng.uniform(size=ids.shape).astype(np.float32)

    def spread(array):
        sharding = NamedSharding(mesh, P("ep"))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    with jax_ep.create_group(mesh, "ep", config, implementation=implementation) as group:

        def experts(scales, rows, sizes):
            of_row = jnp.repeat(scales, sizes, total_repeat_length=rows.shape[0])
            return (rows * of_row[:, None]).astype(rows.dtype)

        def layer(x, ids, weights, scales):
            return jax_ep.moe(group, x, ids, weights, experts, scales)

        mapped = jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))

        @jax.jit
        def step(x, ids, weights, scales):
            def total(x):
                out = mapped(x, ids, weights, scales)
                return jnp.sum(out.astype(jnp.float32)), out

            (_, out), d_x = jax.value_and_grad(total, has_aux=True)(x)
            return out, d_x

        arrays = spread(x.astype(config.dtype)), spread(ids), spread(weights), spread(scales)
        for _ in range(play.steps):
            out, d_x = step(*arrays)
        factor = np.sum(weights * scales[ids], axis=1, keepdims=True)
        tolerance = 1e-5 if play.dtype == "float32" else 4e-2
        x = np.asarray(x.astype(config.dtype), np.float32)
        for got, expected in ((out, x * factor), (d_x, np.broadcast_to(factor, x.shape))):
            for shard in got.addressable_shards:
                np.testing.assert_allclose(
                    np.asarray(shard.data, np.float32),
                    expected[shard.index],
                    rtol=tolerance,
                    atol=tolerance,
                )


def _links(folder):
    found = []
    for entry in os.listdir(folder):
        try:
            found.append(os.readlink(f"{folder}/{entry}"))
        except OSError:  # the listing's own
            continue
    return sorted(re.sub(r"\d+", "N", link) for link in found)


def look():
    """What this process holds, after giving back what it can: numbers, and lists that explain."""
    import jax

    jax.clear_caches()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = pathlib.Path("/proc/self/status").read_text()
    shared = [
        (line.split(maxsplit=5)[-1].strip(), line.split("-"))
        for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
        if "/memfd:" in line or "/dev/shm" in line
    ]
    sizes = [int(end.split()[0], 16) - int(begin, 16) for _, (begin, end, *_) in shared]
    tasks = pathlib.Path("/proc/self/task")
    names = []
    for task in tasks.iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:
            continue
    files = _links("/proc/self/fd")
    return {
        "rss": int(re.search(r"VmRSS:\s*(\d+)", status)[1]) << 10,
        "descriptors": len(files),
        "threads": sum(name not in ELASTIC_THREADS for name in names),
        "shared_bytes": sum(sizes),
        "files": files,
        "thread_names": sorted(names),
        "mappings": sorted(name for name, _ in shared),
    }


def work(args):
    """A worker: rounds until the time is over, a line of what it holds after every few."""
    import jax

    if args.devices > 1:
        jax.config.update("jax_num_cpu_devices", args.devices)
    import numpy as np
    from jax.experimental import multihost_utils

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
    rng = random.Random(args.seed)
    begin = time.time()
    kept = []  # what an injected leak holds
    path = args.out / f"{args.name}{jax.process_index()}.jsonl"
    with path.open("w") as file:
        for number in range(10**9):
            # Process 0 says when it is over: all must make the same rounds.
            is_over = (
                time.time() - begin > args.minutes * 60
                and number > WARM_UP + (LEAST_LOOKS - 1) * LOOK_EVERY
            )
            if jax.process_count() > 1:
                is_over = bool(multihost_utils.broadcast_one_to_all(np.array(is_over)))
            if is_over:
                break
            play = Round.draw(rng, mesh.size)
            try:
                _play(play, mesh, args.implementation)
            except BaseException:
                print(f"round {number}: {play}", file=sys.stderr, flush=True)
                raise
            if args.leak == "descriptor":
                kept.append(os.open("/dev/null", os.O_RDONLY))
            if number % LOOK_EVERY == 0:
                line = {
                    "round": number,
                    "seconds": time.time() - begin,
                    "pid": os.getpid(),
                } | look()
                file.write(json.dumps(line) + "\n")
                file.flush()


# ---- What is made of it -------------------------------------------------------------------------


def judge(samples, name):
    """What has grown in a process, as sentences."""
    steady = [each for each in samples if each["round"] >= WARM_UP]
    if len(steady) < LEAST_LOOKS:
        return [f"{name}: only {len(samples)} looks, too few to say anything"]
    first, last = steady[0], steady[-1]
    faults = []
    for key, list_key in (
        ("descriptors", "files"),
        ("threads", "thread_names"),
        ("shared_bytes", "mappings"),
    ):
        # Whatever is at work for a moment is gone at another look.
        least = min(each[key] for each in steady[-3:])
        if least > first[key]:
            more = list(last[list_key])
            for item in first[list_key]:
                if item in more:
                    more.remove(item)
            faults.append(
                f"{name}: {key} grew from {first[key]} to {least} in rounds {first['round']} to "
                f"{last['round']}: {more[:12]}"
            )
    return faults


def growth(samples):
    """Bytes a round by which the resident memory grows: the median slope between halves."""
    steady = [each for each in samples if each["round"] >= WARM_UP]
    half = len(steady) // 2
    pairs = zip(steady[:half], steady[-half:], strict=True)
    slopes = sorted((b["rss"] - a["rss"]) / (b["round"] - a["round"]) for a, b in pairs)
    return slopes[len(slopes) // 2]


def plot(all_samples, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 6), constrained_layout=True)
    titles = (
        ("rss", "resident memory, MiB", 1 << 20),
        ("shared_bytes", "shared memory with no group open, MiB", 1 << 20),
        ("descriptors", "descriptors", 1),
        ("threads", "threads", 1),
    )
    for axis, (key, title, unit) in zip(axes.flat, titles, strict=True):
        for name, samples in all_samples.items():
            axis.plot(
                [each["seconds"] / 60 for each in samples],
                [each[key] / unit for each in samples],
                label=name,
            )
        axis.set(title=title, xlabel="minutes", ylim=(0, None))
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=110)


def read(folder):
    """By the names of processes, what they have written."""
    return {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    }


def _start(args, name, *command, devices=1, implementation="native"):
    script = [str(pathlib.Path(__file__)), "--name", name, "--devices", str(devices)]
    script += ["--minutes", str(args.minutes), "--seed", str(args.seed), "--out", str(args.out)]
    script += ["--implementation", implementation, "--leak", args.leak]
    log = (args.out / f"{name}.log").open("w")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "32"}
    return subprocess.Popen(
        [sys.executable, *command, *script], stdout=log, stderr=log, env=environment
    )


def _pause_some(folder, rng):
    """Stops a process of `many` for a moment."""
    pids = [
        samples[-1]["pid"] for name, samples in read(folder).items() if "many" in name if samples
    ]
    if not pids:
        return 0
    pid = rng.choice(pids)
    try:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(rng.uniform(*PAUSE_S))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--leak", default="", help="for tests of this script: descriptor")
    parser.add_argument("--without", default="", help="of one, many, chaos, control; by commas")
    parser.add_argument("--name", help=argparse.SUPPRESS)  # of a worker
    parser.add_argument("--devices", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--implementation", default="native", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.name:
        return work(args)
    args.out = args.out or pathlib.Path(tempfile.mkdtemp(prefix="jax_ep_soak_"))
    args.out.mkdir(parents=True, exist_ok=True)
    for old in args.out.glob("*.jsonl"):
        old.unlink()
    shm_before = set(os.listdir("/dev/shm"))
    wanted = {"one", "many", "chaos", "control"} - set(args.without.split(","))
    running = {}
    if "one" in wanted:
        running["one"] = _start(args, "one", devices=4)
    if "control" in wanted:
        running["control"] = _start(args, "control", devices=4, implementation="xla")
    if "many" in wanted:
        running["many"] = _start(args, "many", "-m", "jax_ep", "launch", "-n", "3")
    begin, pauses, episodes = time.monotonic(), 0, 0
    faults, rng = [], random.Random(args.seed)
    while any(process.poll() is None for process in running.values()):
        if time.monotonic() - begin > args.minutes * 60 + END_S:
            faults += [
                f"{n}: still runs {END_S} s after its time"
                for n, p in running.items()
                if p.poll() is None
            ]
            break
        time.sleep(1.0)
        if time.monotonic() - begin > args.minutes * 60:
            continue
        if "many" in running and running["many"].poll() is None:
            pauses += _pause_some(args.out, rng)
        if "chaos" in wanted:
            command = [
                str(FOLDER / "world.py"),
                "--count",
                "1",
                "--first",
                str(args.seed + episodes),
            ]
            done = subprocess.run(
                [sys.executable, *command], capture_output=True, text=True, check=False
            )
            episodes += 1
            if done.returncode != 0:
                faults.append(f"chaos: {done.stdout[-2000:]}")
    for name, process in running.items():
        if process.poll() is None:
            process.kill()
        if process.wait() != 0:
            log = (args.out / f"{name}.log").read_text()
            faults.append(f"{name}: exit code {process.returncode}: {log[-3000:]}")
    all_samples = read(args.out)
    for name, samples in all_samples.items():
        if name != "control0":
            faults += judge(samples, name)
    left = sorted(set(os.listdir("/dev/shm")) - shm_before)
    if left:
        faults.append(f"/dev/shm has {left}")
    rates = {name: growth(s) for name, s in all_samples.items() if len(s) * LOOK_EVERY > RSS_ROUNDS}
    for name, rate in rates.items():
        allowed = max(rates.get("control0", 0.0), 0.0) + RSS_BOUND
        if name.startswith(("one", "many")) and rate > allowed:
            faults.append(
                f"{name}: resident memory grows by {rate / 1024:.0f} KiB a round, control's by "
                f"{(allowed - RSS_BOUND) / 1024:.0f}; the bound is {RSS_BOUND >> 10} more"
            )
    rounds = {name: samples[-1]["round"] for name, samples in all_samples.items() if samples}
    summary = {
        "minutes": args.minutes,
        "seed": args.seed,
        "rounds": rounds,
        "pauses": pauses,
        "episodes": episodes,
        "kib_a_round": {name: round(rate / 1024, 1) for name, rate in rates.items()},
        "faults": faults,
    }
    (args.out / "soak.json").write_text(json.dumps(summary, indent=1) + "\n")
    if all_samples:
        plot(all_samples, args.out / "soak.png")
    print(
        f"{args.out}: rounds {rounds}, {pauses} pauses, {episodes} episodes with kills and such, "
        f"KiB a round {summary['kib_a_round'] or 'not said: too few rounds'}"
    )
    for fault in faults:
        print(fault)
    print(f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
