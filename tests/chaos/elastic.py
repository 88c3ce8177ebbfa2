"""A group that loses ranks at every phase, goes on without them, and takes them back.

    python tests/chaos/elastic.py [--kills 50] [--seed 0] [--transport auto] [--node-size N]
        [--gpus N]

One job of forked ranks, beside a process that serves JAX's store. Each round kills one of them
somewhere (PHASES); the others must agree within --agree-s (PEER_TIMEOUT_S + 2 s, but on a machine
that is too slow for it) and go on with exactly the right numbers. Then the rank is started again
and readmitted. Any rank may be lost but the last, the witness: at the end it may hold no more
descriptors, threads or shared memory than after the first rounds.
"""

import argparse
import pathlib
import random
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from elastic_job import ON_GPUS, PHASES, Job
from elastic_rank import PEER_TIMEOUT_S, TIMEOUT_S, Setup

AGREE_S = PEER_TIMEOUT_S + 2.0


def play(kills, seed, setup, folder, phases=PHASES, victims=None, agree_s=AGREE_S, brief=False):
    """Plays `kills` rounds; AssertionError if one goes wrong. What a kill took, in seconds."""
    rng = random.Random(seed)
    job = Job(setup, folder)
    held = None
    try:
        job.all("steps", 3)
        for number in range(kills):
            phase = phases[number % len(phases)]
            by_nodes = setup.node_size not in (None, 1) and setup.mode != "ll"
            losable = range(setup.ranks - (setup.node_size if by_nodes else 1))
            victim = rng.choice(losable if victims is None else victims)
            begun = time.monotonic()
            try:
                if by_nodes:
                    phase = "a node"
                    job.lose_a_node(victim)
                else:
                    lost = job.lose(victim, phase, rng)
                    if number == 0 and not brief:
                        job.all("sweep", seed)
                        job.refuse_another_config(lost[0])
                    job.take_back(*lost)
                job.check_logs(phase)
            except AssertionError as error:
                where = f"round {number}, {phase}, rank {victim}"
                raise AssertionError(f"{where}: {error}\n{job.texts()}") from error
            print(
                f"{number}: {phase}, rank {victim}: agreed after {job.seconds[-1]:.2f} s, "
                f"all in {time.monotonic() - begun:.1f} s",
                flush=True,
            )
            if number == 1:
                held = job.ask_witness("held")
        if kills > 2:
            now = job.ask_witness("held")
            assert all(n <= before + 2 for n, before in zip(now[:2], held[:2], strict=True)), (
                f"descriptors, threads, shared KiB were {held}, are {now}"
            )
            assert now[2] == held[2], f"shared memory was {held[2]} KiB, is {now[2]}"
        slow = [s for s in job.seconds if s > agree_s]
        assert not slow, f"agreed after {slow} s"
        job.close()
    finally:
        job.end()
    return job.seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", default="auto", help="auto, shm, ofi or verbs")
    parser.add_argument("--node-size", type=int)
    parser.add_argument("--mode", default="auto", help="auto, or ll for calls of that mode only")
    parser.add_argument("--hosts", action="store_true", help="each rank plays a host")
    parser.add_argument("--gpus", type=int, default=0, help="that the ranks share (0: CPUs)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--agree-s", type=float, default=AGREE_S, help="from a kill to the mask")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="of the group")
    parser.add_argument("--phases", help=f"of {','.join(PHASES)} (GPUs: {','.join(ON_GPUS)})")
    parser.add_argument("--victims", type=int, nargs="+", help="ranks to lose (default: any)")
    parser.add_argument(
        "--brief",
        action="store_true",
        help="without every layout and another Config, which are alike for all transports",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jax_ep_elastic") as folder:
        seconds = play(
            args.kills,
            args.seed,
            Setup(
                args.ranks,
                args.transport,
                args.node_size,
                args.mode,
                hosts=args.hosts,
                gpus=args.gpus,
                timeout_s=args.timeout_s,
            ),
            pathlib.Path(folder),
            tuple(args.phases.split(",")) if args.phases else ON_GPUS if args.gpus else PHASES,
            args.victims,
            args.agree_s,
            args.brief,
        )
    print(f"{len(seconds)} kills, the slowest agreement after {max(seconds):.2f} s")


if __name__ == "__main__":
    main()
