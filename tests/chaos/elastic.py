"""A group that loses ranks at every phase, goes on without them, and takes them back.

    python tests/chaos/elastic.py [--kills 50] [--seed 0] [--transport memory] [--ranks 4]

One job of forked ranks. Each round kills one of them somewhere (PHASES); the others must agree
within PEER_TIMEOUT_S + 2 s and go on with exactly the right numbers. Then the rank is started again
and readmitted. At the end no survivor may hold more descriptors, threads or shared memory than
after the first rounds.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import select
import signal
import socket
import sys
import tempfile
import time
import traceback

import jax

import jax_ep  # before the forks, which save each rank its seconds

TOKENS, HIDDEN, TOP_K = 8, 32, 2
EXPERTS_PER_RANK = 2
PEER_TIMEOUT_S = 3.0
AGREE_S = PEER_TIMEOUT_S + 2.0
REPLY_S = 60.0
# The channel before whose first signal the victim stands while it is killed, or what else happens.
STALLS = {
    "plan": "plan",
    "rows": "dispatch",
    "combine": "reduce",
    "ll rows": "ll-dispatch",
    "ll combine": "ll-combine",
}
PHASES = (*STALLS, "between calls", "anywhere", "joined", "decided", "building")


# ---- A rank -----------------------------------------------------------------------------------


class Rank:
    """What a forked process does on command."""

    def __init__(self, index, ranks, transport):
        import numpy as np
        from jax.sharding import Mesh

        self.index, self.ranks = index, ranks
        self.mesh = Mesh(np.array(jax.devices()), ("ep",))
        self.x = np.arange(ranks * TOKENS * HIDDEN, dtype=np.float32).reshape(-1, HIDDEN) % 31
        rng = np.random.default_rng(7)
        experts = EXPERTS_PER_RANK * ranks
        self.ids = np.stack([rng.permutation(experts)[:TOP_K] for _ in self.x]).astype(np.int32)
        self.group = jax_ep.create_group(self.mesh, "ep", self._config(transport))
        self.active = self.group.active
        self.program = self._make_program()
        self.args = [self._place(array) for array in (self.x, self.ids)]
        self.compilations = 0

    def _config(self, transport):
        import jax.numpy as jnp

        return jax_ep.Config(
            num_experts=EXPERTS_PER_RANK * self.ranks,
            top_k=TOP_K,
            hidden=HIDDEN,
            max_tokens=TOKENS,
            dtype=jnp.float32,
            align=1,
            timeout_s=30.0,
            peer_timeout_s=PEER_TIMEOUT_S,
            node_size=None if transport == "memory" else 1,
            transport={"memory": "auto"}.get(transport, transport),
            elastic=True,
        )

    def _place(self, array, *axes):
        from jax.sharding import NamedSharding
        from jax.sharding import PartitionSpec as P

        sharding = NamedSharding(self.mesh, P(*(axes or ("ep",))))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def _make_program(self):
        """x to its experts, times the expert's number + 1, and back, in both modes."""
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P

        group = self.group

        def step(x, ids, active):
            first = jax.lax.axis_index("ep") * EXPERTS_PER_RANK
            scale = (first + jnp.arange(EXPERTS_PER_RANK) + 1).astype(x.dtype)[:, None, None]
            weights = jnp.full(ids.shape, 1 / TOP_K, jnp.float32)
            outs = []
            for mode in ("ht", "ll"):
                recv = jax_ep.dispatch(
                    group,
                    x,
                    ids,
                    weights,
                    mode=mode,
                    layout="expert_batched",
                    active=active,
                    renormalize=True,
                )
                y = recv.x * scale
                outs.append(jax_ep.combine(group, y, recv))
                x = x + 0 * outs[-1]  # one after the other
            return (*outs, recv.plan.num_unreachable[None])

        spec = P("ep")
        wrapped = jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=(spec, spec, P()),
            out_specs=(spec, spec, spec),
            check_vma=False,
        )
        return jax.jit(wrapped)

    def step(self):
        """One call of the program; AssertionError if a bit is wrong."""
        import numpy as np

        outs = self.program(*self.args, self._place(self.active, None))
        got = [np.asarray(out.addressable_shards[0].data) for out in outs]
        mine = slice(self.index * TOKENS, (self.index + 1) * TOKENS)
        ids = self.ids[mine]
        reached = self.active[ids // EXPERTS_PER_RANK] != 0
        count = reached.sum(1, keepdims=True)
        weights = np.where(reached, np.float32(1) / np.maximum(count, 1), 0).astype(np.float32)
        # Whole numbers and weights of 1 or 1/2: exact in any order.
        want = self.x[mine] * (weights * (ids + 1)).sum(1, keepdims=True).astype(np.float32)
        for out in got[:2]:
            assert np.array_equal(out, want), f"wrong bits with active {self.active.tolist()}"
        assert got[2][0] == (~reached).sum(), f"{got[2][0]} unreachable pairs"

    def agree(self):
        self.active = self.group.agree()
        assert self.program._cache_size() <= 1, "compiled again"
        return self.active.tolist()

    # Commands: each returns what is reported.

    def steps(self, count):
        for _ in range(count):
            self.step()

    def until_it_fails(self):
        """Steps until one fails because a rank was lost; the error."""
        while True:
            try:
                self.step()
            except (RuntimeError, ValueError) as error:
                return str(error)

    def lose(self):
        """Goes on after a loss: the error, the mask, when it was agreed; and some right steps."""
        error = self.until_it_fails()
        failed_at = time.monotonic()
        active = self.agree()
        agreed_at = time.monotonic()
        self.steps(2)
        return {"error": error, "active": active, "failed_at": failed_at, "agreed_at": agreed_at}

    def take_back(self, rank):
        self.group.readmit(rank)
        return self.agree()

    def stall(self, channel):
        """The next session of this rank stands before its first signal there."""
        os.environ["JAX_EP_TEST_STALL"] = f"{channel}:{self.index}:60"

    def die_in(self, where):
        """Kills this process at that place of its next agree."""
        from jax_ep._runtime import agreement, cpu

        def die(*_args, **_kwargs):
            os.kill(os.getpid(), signal.SIGKILL)

        if where == "building":
            cpu.start = die
        elif where == "decided":
            decide = agreement.decide
            agreement.decide = lambda *args, **kwargs: die(decide(*args, **kwargs))
        else:
            put = agreement.Store.put
            agreement.Store.put = lambda *args, **kwargs: die(put(*args, **kwargs))

    def held(self):
        """Descriptors, threads and bytes of shared memory of this process."""
        maps = pathlib.Path("/proc/self/smaps").read_text().splitlines()
        shared, is_ours = 0, False
        for line in maps:
            if "-" in line.split()[0]:
                is_ours = "memfd:" in line
            elif is_ours and line.startswith("Size:"):
                shared += int(line.split()[1])
        threads = len(os.listdir("/proc/self/task"))
        return [len(os.listdir("/proc/self/fd")), threads, shared]

    def close(self):
        self.group.close()


def _run_rank(index, ranks, port, transport, pipes, log):
    """In the child: never returns."""
    commands, reports = pipes
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["NPROC"] = "4"
    os.environ["JAX_EP_SOCKET_IFNAME"] = "lo"
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)

    def report(record):
        os.write(reports, json.dumps(record).encode() + b"\n")

    try:
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(address, ranks, index, coordinator_bind_address=address)
        rank = Rank(index, ranks, transport)
        report({"made": rank.active.tolist()})
        with os.fdopen(commands) as lines:
            for line in lines:
                name, *args = json.loads(line)
                report({"did": name, "result": getattr(rank, name)(*args)})
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            report({"raised": f"{type(error).__name__}: {error}"})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# ---- The job ----------------------------------------------------------------------------------


class Child:
    """The runner's end of a rank."""

    def __init__(self, pid, commands, reports, log):
        self.pid, self.commands, self.reports, self.log = pid, commands, reports, log
        self._partial = b""

    def tell(self, *command):
        os.write(self.commands, json.dumps(command).encode() + b"\n")

    def hear(self, timeout_s=REPLY_S):
        """The next report."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._partial:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.reports], [], [], left)[0]:
                raise AssertionError(f"no answer within {timeout_s} s\n{self.text()}")
            data = os.read(self.reports, 1 << 16)
            if not data:
                raise AssertionError(f"it ended\n{self.text()}")
            self._partial += data
        line, _, self._partial = self._partial.partition(b"\n")
        record = json.loads(line)
        if "raised" in record:
            raise AssertionError(f"{record['raised']}\n{self.text()}")
        return record

    def result(self, timeout_s=REPLY_S):
        return self.hear(timeout_s)["result"]

    def text(self):
        return self.log.read_text(errors="replace")[-4000:]

    def end(self, number=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        os.waitpid(self.pid, 0)
        os.close(self.commands)
        os.close(self.reports)


class Job:
    """Ranks that are killed and started again."""

    def __init__(self, ranks, transport, folder):
        self.ranks, self.transport, self.folder = ranks, transport, folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.children = {}
        self.starts = 0
        self.seconds = []  # from each kill to the last survivor's agreement
        for index in range(ranks):
            self.start(index)
        for index in range(ranks):
            assert self.children[index].hear()["made"] == [1] * ranks

    def start(self, index):
        self.starts += 1
        log = self.folder / f"rank{index}.{self.starts}.log"
        command_out, command_in = os.pipe()
        report_out, report_in = os.pipe()
        fd = os.open(log, os.O_CREAT | os.O_WRONLY)
        pid = os.fork()
        if pid == 0:
            for child in self.children.values():
                os.close(child.commands)
                os.close(child.reports)
            os.close(command_in)
            os.close(report_out)
            _run_rank(index, self.ranks, self.port, self.transport, (command_out, report_in), fd)
        for end in (command_out, report_in, fd):
            os.close(end)
        self.children[index] = Child(pid, command_in, report_out, log)

    def all(self, *command, but=()):
        """The results of a command that all do at once."""
        doing = [i for i in self.children if i not in but]
        for index in doing:
            self.children[index].tell(*command)
        return {index: self.children[index].result() for index in doing}

    def masks(self, results):
        """The one mask that all have agreed on, which must name the living."""
        living = [int(index in self.children) for index in range(self.ranks)]
        for index, active in results.items():
            assert active == living, f"rank {index} has {active}, living are {living}"

    def lose(self, victim, phase, rng):
        """Kills `victim` in that phase; the others go on."""
        child = self.children[victim]
        if phase in STALLS:
            child.tell("stall", STALLS[phase])
            child.result()
            self.masks(self.all("agree"))  # all live, and a session that will stand is made
        others = [index for index in self.children if index != victim]
        if phase in ("joined", "decided", "building"):
            child.tell("die_in", phase)
            child.result()
            for index in self.children:
                self.children[index].tell("agree")
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            struck_at = time.monotonic()
            self.drop(victim)
            said = {index: self.children[index].result() for index in others}
            self.seconds.append(time.monotonic() - struck_at)
            if any(active[victim] for active in said.values()):  # it had been agreed on with it
                said = {i: r["active"] for i, r in self.all("lose").items()}
            self.masks(said)
            self.all("steps", 2)
            return
        for index in others:
            self.children[index].tell("lose")
        if phase != "between calls":
            child.tell("until_it_fails")
            time.sleep(rng.uniform(0.0, 0.2) if phase == "anywhere" else 0.15)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        struck_at = time.monotonic()
        self.drop(victim)
        said = {index: self.children[index].result() for index in others}
        self.masks({index: record["active"] for index, record in said.items()})
        for index, record in said.items():
            assert f"rank {victim}" in record["error"], f"rank {index}: {record['error']}"
        self.seconds.append(max(record["agreed_at"] for record in said.values()) - struck_at)

    def drop(self, victim):
        self.children.pop(victim).end()

    def take_back(self, rank):
        self.start(rank)
        newcomer = self.children[rank]
        said = self.all("take_back", rank, but=(rank,))
        self.masks({**said, rank: newcomer.hear()["made"]})
        self.all("steps", 3)

    def close(self):
        self.all("close")
        for index in sorted(self.children, reverse=True):  # rank 0 serves the store
            self.drop(index)


def play(kills, seed, transport, ranks, folder, phases=PHASES):
    """Plays `kills` rounds; AssertionError if one goes wrong. What a kill took, in seconds."""
    rng = random.Random(seed)
    job = Job(ranks, transport, folder)
    held = None
    try:
        job.all("steps", 3)
        for number in range(kills):
            phase = phases[number % len(phases)]
            victim = rng.randrange(1, ranks)
            begun = time.monotonic()
            try:
                job.lose(victim, phase, rng)
                job.take_back(victim)
            except AssertionError as error:
                raise AssertionError(f"round {number}, {phase}, rank {victim}: {error}") from error
            print(
                f"{number}: {phase}, rank {victim}: agreed after {job.seconds[-1]:.2f} s, "
                f"all in {time.monotonic() - begun:.1f} s",
                flush=True,
            )
            if number == 1:
                held = job.children[0]
                held.tell("held")
                held = held.result()
        if kills > 2:
            job.children[0].tell("held")
            now = job.children[0].result()
            assert all(n <= before + 2 for n, before in zip(now[:2], held[:2], strict=True)), (
                f"descriptors, threads, shared KiB were {held}, are {now}"
            )
            assert now[2] == held[2], f"shared memory was {held[2]} KiB, is {now[2]}"
        slow = [s for s in job.seconds if s > AGREE_S]
        assert not slow, f"agreed after {slow} s"
        job.close()
    finally:
        for index in list(job.children):
            job.drop(index)
    return job.seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", default="memory", help="memory, shm, ofi or verbs")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--phases", default=",".join(PHASES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jax_ep_elastic") as folder:
        seconds = play(
            args.kills,
            args.seed,
            args.transport,
            args.ranks,
            pathlib.Path(folder),
            tuple(args.phases.split(",")),
        )
    print(f"{len(seconds)} kills, the slowest agreement after {max(seconds):.2f} s")


if __name__ == "__main__":
    main()
