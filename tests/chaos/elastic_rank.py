"""A rank of `elastic.py`: what its forked process does on command.

Its numbers are whole and its weights powers of two, so results are exact in any order of adding.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import pathlib
import signal
import sys
import time
import traceback

import jax
import numpy as np

import jax_ep
from jax_ep import _jax_compat
from jax_ep._launch import join

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import oracle

TOKENS, HIDDEN, TOP_K = 8, 32, 2
EXPERTS_PER_RANK = 2
PEER_TIMEOUT_S = 3.0
TIMEOUT_S = 30.0
LAYOUTS = ("expert_major", "expert_batched", "rank_major")


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a job's group is like."""

    ranks: int = 4
    transport: str = "auto"
    node_size: int | None = None  # None: all in one node
    mode: str = "auto"  # "ll": calls of mode ll only
    align: int = 1
    timeout_s: float = TIMEOUT_S
    hosts: bool = False  # each rank plays a host: nobody sees another's process
    gpus: int = 0  # that the ranks share; 0: CPU devices

    @property
    def modes(self):
        return ("ll",) if self.mode == "ll" else ("ht", "ll")


class Rank:
    """What a forked process does on command."""

    def __init__(self, index, setup):
        from jax.sharding import Mesh

        self.index, self.setup = index, setup
        ranks = setup.ranks
        if setup.hosts:
            from jax_ep._runtime import bootstrap

            bootstrap.host_id = lambda: f"host {index}"
        self.mesh = Mesh(np.array(jax.devices()), ("ep",))
        self.x = np.arange(ranks * TOKENS * HIDDEN, dtype=np.float32).reshape(-1, HIDDEN) % 31
        rng = np.random.default_rng(7)
        experts = EXPERTS_PER_RANK * ranks
        self.ids = np.stack([rng.permutation(experts)[:TOP_K] for _ in self.x]).astype(np.int32)
        self.group = jax_ep.create_group(self.mesh, "ep", self._config())
        self.active = self.group.active
        self.program = self._make_program()
        self.args = [self._place(array) for array in (self.x, self.ids)]

    def _config(self):
        import jax.numpy as jnp

        return jax_ep.Config(
            num_experts=EXPERTS_PER_RANK * self.setup.ranks,
            top_k=TOP_K,
            hidden=HIDDEN,
            max_tokens=TOKENS,
            dtype=jnp.float32,
            align=self.setup.align,
            timeout_s=self.setup.timeout_s,
            peer_timeout_s=PEER_TIMEOUT_S,
            mode=self.setup.mode,
            node_size=self.setup.node_size,
            transport=self.setup.transport,
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
            for mode in self.setup.modes:
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
            out_specs=(spec,) * (len(self.setup.modes) + 1),
            check_vma=False,
        )
        return jax.jit(wrapped)

    def step(self):
        """One call of the program; AssertionError if a bit is wrong."""
        outs = self.program(*self.args, self._place(self.active, None))
        got = [np.asarray(out.addressable_shards[0].data) for out in outs]
        self.group.check()  # a call on a GPU has no errors of its own
        mine = slice(self.index * TOKENS, (self.index + 1) * TOKENS)
        ids = self.ids[mine]
        reached = self.active[ids // EXPERTS_PER_RANK] != 0
        count = reached.sum(1, keepdims=True)
        weights = np.where(reached, np.float32(1) / np.maximum(count, 1), 0).astype(np.float32)
        # Whole numbers and weights of 1 or 1/2: exact in any order.
        want = self.x[mine] * (weights * (ids + 1)).sum(1, keepdims=True).astype(np.float32)
        for out in got[:-1]:
            assert np.array_equal(out, want), f"wrong bits with active {self.active.tolist()}"
        assert got[-1][0] == (~reached).sum(), f"{got[-1][0]} unreachable pairs"

    def agree(self, timeout_s=None):
        self.active = self.group.agree(timeout_s)
        assert self.program._cache_size() <= 1, "compiled again"
        return self.active.tolist()

    def _sweep_program(self, layout, mode):
        from jax.sharding import PartitionSpec as P

        def step(x, ids, active):
            plan = jax_ep.plan(self.group, ids, mode=mode, layout=layout, active=active)
            recv = jax_ep.dispatch(self.group, x, plan=plan)
            out = jax_ep.combine(self.group, recv.x, plan, None)
            rows = recv.x.reshape(-1, HIDDEN)
            return jax.tree.map(lambda leaf: leaf[None], (plan, rows, out))

        spec = P("ep")
        specs = {"in_specs": (spec, spec, P()), "out_specs": spec, "check_vma": False}
        return jax.jit(jax.shard_map(step, mesh=self.mesh, **specs))

    # Commands: each returns what is reported.

    def steps(self, count):
        for _ in range(count):
            self.step()

    def sweep(self, seed):
        """Plans, rows and sums of every layout and mode against the oracle with the mask."""
        ranks = self.setup.ranks
        experts = EXPERTS_PER_RANK * ranks
        rng = np.random.default_rng(seed)
        ids = rng.integers(-2, experts + 1, (ranks, TOKENS, TOP_K)).astype(np.int32)
        x = rng.integers(-9, 9, (ranks, TOKENS, HIDDEN)).astype(np.float32)
        args = [self._place(array.reshape(ranks * TOKENS, -1)) for array in (x, ids)]
        in_range = (ids >= 0) & (ids < experts)
        lost = in_range & (self.active[np.where(in_range, ids, 0) // EXPERTS_PER_RANK] == 0)
        masked = np.where(lost | (self.active == 0)[:, None, None], -1, ids)
        spec = oracle.Spec(ranks, experts, TOP_K, TOKENS, align=1)
        for layout in LAYOUTS:
            for mode in self.setup.modes:
                program = self._sweep_program(layout, mode)
                made, rows, out = jax.tree.map(
                    lambda leaf: np.asarray(leaf.addressable_shards[0].data)[0],
                    program(*args, self._place(self.active, None)),
                )
                plans = oracle.plan(spec, masked, mode, layout)
                want = plans[self.index]
                for field in dataclasses.fields(want):
                    if field.name != "pairs_of_row" and getattr(want, field.name) is not None:
                        got = getattr(made, field.name)
                        same = np.array_equal(got, getattr(want, field.name))
                        assert same, f"{layout} {mode}: {field.name} is {got}, not {want}"
                assert made.num_unreachable == lost[self.index].sum()
                all_rows, _ = oracle.dispatch(plans, x, None)
                assert np.array_equal(rows, all_rows[self.index]), f"{layout} {mode}: rows"
                sums, _ = oracle.combine(plans, all_rows, None, TOKENS)
                assert np.array_equal(out, sums[self.index]), f"{layout} {mode}: sums"

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

    def find_out(self):
        """What a rank meets that the others have left out: its call's error, and agree's."""
        error = self.until_it_fails()
        try:
            self.group.agree()
        except RuntimeError as left_out:
            assert "was left out" in str(left_out), left_out
        else:
            raise AssertionError("agree did not raise")
        assert "was left out" in self.group.health().message
        assert "was left out" in self.until_it_fails()  # and not to call agree
        assert "was left out" in self.group.report().splitlines()[0]
        assert "FAILED" not in self.group.report()
        self.group.close()
        return error

    def wrong_mask(self, without=None):
        """Steps with all ranks, as if nobody was lost, or without one that works; the error."""
        if without is None:
            self.active[:] = 1
        else:
            self.active[without] = 0
        return self.until_it_fails()

    def take_back(self, ranks):
        for rank in ranks:
            self.group.readmit(rank)
        return self.agree()

    def stall(self, channel):
        """The next session of this rank stands before its first signal there."""
        os.environ["JAX_EP_TEST_STALL"] = f"{channel}:{self.index}:60"

    def die_in(self, where):
        """Kills this process at that place of its next agree."""
        from jax_ep._runtime import agreement, cpu, gpu

        def die(*_args, **_kwargs):
            os.kill(os.getpid(), signal.SIGKILL)

        if where == "building":
            cpu.start = gpu.start = die
        elif where == "decided":
            decide = agreement.decide
            agreement.decide = lambda *args, **kwargs: die(decide(*args, **kwargs))
        else:
            put = agreement.GroupStore.put
            agreement.GroupStore.put = lambda *args, **kwargs: die(put(*args, **kwargs))

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
        if self.setup.gpus:
            assert "keep 0 bytes of device memory" in self.group.dump_state()
        return [len(os.listdir("/proc/self/fd")), threads, shared]

    def close(self):
        self.group.close()


def serve_store(port, ranks, lifeline):
    """In the child, until `lifeline` has no writer: never returns."""
    try:
        service = _jax_compat.start_coordination_service(f"127.0.0.1:{port}", ranks)
        os.read(lifeline, 1)
        service.shutdown()
    finally:
        os._exit(1)


def run(index, setup, port, pipes, log):
    """In the child: never returns."""
    commands, reports = pipes
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR2)  # for a runner that waits in vain
    os.environ["NPROC"] = "4"
    if setup.gpus:
        os.environ["XLA_FLAGS"] = "--xla_gpu_shard_autotuning=false"
        given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(setup.gpus)))
        os.environ["CUDA_VISIBLE_DEVICES"] = given.split(",")[index % setup.gpus]
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.4 * setup.gpus / setup.ranks:.2f}"
        sharing = -(-setup.ranks // setup.gpus)  # wait for each other's blocks
        os.environ["JAX_EP_GPU_SMS"] = str(24 // sharing)  # 8/3 of it in mode ll
    os.environ["JAX_EP_SOCKET_IFNAME"] = "lo"
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)

    def report(record):
        os.write(reports, json.dumps(record).encode() + b"\n")

    try:
        join.join(f"127.0.0.1:{port}", setup.ranks, index, None, 60, process_0_is_gone=False)
        rank = Rank(index, setup)
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
