"""One episode: what each rank of a small world runs, and the one thing that goes wrong in it.

Runs in a process that `world.py` forked after `import jax`, before any backend existed.
"""

import dataclasses
import os
import random
import signal
import subprocess
import threading
import time

TOKENS, HIDDEN, TOP_K = 24, 64, 2
PEER_TIMEOUT_S = 3.0
TIMEOUT_S = 30.0

# What the victim does: the others get an error that names it, or notice nothing. (Of a rank that is
# killed in close only those hear who still use the group.)
FATAL = ("kill", "stop", "kill in create_group", "kill in close", "raise")
HARMLESS = ("late close", "pause", "fork", "compile")
EVENTS = FATAL + HARMLESS


@dataclasses.dataclass(frozen=True)
class Episode:
    """Drawn from a seed; printed whole when it fails, so that it can be run again."""

    seed: int
    transport: str  # "memory" (one node), else one rank a node over "shm", "net" or "tcp"
    mode: str
    ranks: int
    event: str
    victim: int  # never 0, which hosts JAX's coordination service
    step: int  # at which the event is armed
    delay_s: float  # from there to the event

    @staticmethod
    def draw(seed, transports):
        rng = random.Random(seed)
        ranks = rng.choice((2, 3, 3, 4))
        return Episode(
            seed=seed,
            transport=rng.choice(transports),
            mode=rng.choice(("ht", "ll")),
            ranks=ranks,
            event=rng.choice(EVENTS),
            victim=rng.randrange(1, ranks),
            step=rng.randrange(0, 12),
            delay_s=rng.choice((0.0, rng.uniform(0.0, 0.01), rng.uniform(0.0, 0.2))),
        )

    @property
    def is_fatal(self):
        return self.event in FATAL


def _later(delay_s, do):
    """Runs `do` in a thread after `delay_s`, whatever this process is doing then."""

    def run():
        time.sleep(delay_s)
        do()

    threading.Thread(target=run, daemon=True).start()


def _struck(report, number):
    """Sends this process the signal; `report` tells when."""

    def strike():
        report("struck_at", time.monotonic())  # one clock for all processes of a host
        os.kill(os.getpid(), number)

    return strike


def _pause_self():
    pid = os.getpid()
    script = f"kill -STOP {pid}; sleep {PEER_TIMEOUT_S / 3}; kill -CONT {pid}"
    subprocess.run(["sh", "-c", script], check=True)


def _fork_children(group):
    """Children that leave in the ways of a data loader, and meddle with the group."""
    from jax_ep._runtime import session

    for how in ("exit", "close", "_exit"):
        child = os.fork()
        if child == 0:
            code = 0
            try:
                if how == "close":
                    group.dump_state()
                    group.close()
                if how == "exit":
                    session.close_all()  # our hook; JAX's own may hang in a child (docs/errors.md)
            except BaseException:
                code = 3
            os._exit(code)
        _, status = os.waitpid(child, 0)
        if status != 0:
            raise AssertionError(f"the forked child ({how}) ended with status {status}")


class World:
    """This rank's group, program and data."""

    def __init__(self, episode):
        import jax
        import numpy as np
        from jax.sharding import Mesh

        self.episode = episode
        self.mesh = Mesh(np.array(jax.devices()), ("ep",))
        rng = np.random.default_rng(episode.seed)
        count = episode.ranks * TOKENS
        self.x = rng.standard_normal((count, HIDDEN)).astype(np.float32)
        self.idx = rng.integers(0, 2 * episode.ranks, (count, TOP_K)).astype(np.int32)
        self.group = None

    def create(self):
        import jax.numpy as jnp

        import jax_ep

        one_node = self.episode.transport == "memory"
        self.group = jax_ep.create_group(
            self.mesh,
            "ep",
            jax_ep.Config(
                num_experts=2 * self.episode.ranks,
                top_k=TOP_K,
                hidden=HIDDEN,
                max_tokens=TOKENS,
                dtype=jnp.float32,
                align=1,
                timeout_s=TIMEOUT_S,
                peer_timeout_s=PEER_TIMEOUT_S,
                node_size=None if one_node else 1,
                transport={"memory": "auto", "shm": "shm"}.get(self.episode.transport, "ofi"),
            ),
        )
        self.x_dev, self.idx_dev = self._place(self.x), self._place(self.idx)

    def _place(self, array):
        import jax
        from jax.sharding import NamedSharding
        from jax.sharding import PartitionSpec as P

        sharding = NamedSharding(self.mesh, P("ep"))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def program(self, scale):
        """x * scale to its experts and back, twice; exact in f32 for powers of two."""
        import jax
        from jax.sharding import PartitionSpec as P

        import jax_ep

        def step(x, idx):
            recv = jax_ep.dispatch(self.group, x * scale, idx, mode=self.episode.mode)
            once = jax_ep.combine(self.group, recv.x, recv)
            again = jax_ep.dispatch(self.group, once, (idx + 1) % 2, mode=self.episode.mode)
            return jax_ep.combine(self.group, again.x, again)

        spec = P("ep")
        wrapped = jax.shard_map(
            step, mesh=self.mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
        )
        return jax.jit(wrapped)

    def run(self, program, scale):
        """One step; AssertionError if any bit is wrong."""
        import numpy as np

        out = program(self.x_dev, self.idx_dev)
        for shard in out.addressable_shards:
            want = self.x[shard.index] * np.float32(scale * TOP_K * TOP_K)
            if not np.array_equal(np.asarray(shard.data), want):
                raise AssertionError("wrong bits")


def _is_jax_error(error):
    import jax

    return isinstance(error, (jax.errors.JaxRuntimeError, ValueError, RuntimeError))


def play(episode, me, report, await_word):
    """Runs rank `me`. `report(key, value)` tells the runner; `await_word()` waits for its word."""
    from jax_ep import _jax_compat

    world = World(episode)
    is_victim = me == episode.victim
    meet = _jax_compat.distributed_client().wait_at_barrier
    meet("begin", 60_000)
    if is_victim and episode.event == "kill in create_group":
        _later(episode.delay_s, _struck(report, signal.SIGKILL))
    try:
        world.create()
        if is_victim and episode.event == "kill in create_group":
            time.sleep(TIMEOUT_S)  # it will not return
        _steps(episode, world, is_victim, meet, report)
        report("error", None)
    except AssertionError as error:
        report("wrong", str(error))
    except Exception as error:
        if not _is_jax_error(error):
            raise
        if is_victim and episode.event == "raise":
            report("raised", str(error))
            import atexit

            atexit._run_exitfuncs()  # what the interpreter would do now
            return
        report("failed_at", time.monotonic())
        report("error", str(error))
    if world.group is not None:
        _close(episode, world, is_victim, report)
    report("done", True)
    await_word()  # rank 0 takes JAX's coordination service along


def _steps(episode, world, is_victim, meet, report):
    program = world.program(1.0)
    world.run(program, 1.0)
    meet("warm", 60_000)
    count = episode.step + 8
    for step in range(count):
        if is_victim and step == episode.step:
            _strike(episode, world, report)
        if episode.event == "compile" and step == episode.step:
            _compile_at_once(world, is_victim)
        world.run(program, 1.0)
    if episode.event in ("kill", "stop", "raise"):
        for _ in range(100_000):  # until the event has struck
            world.run(program, 1.0)


def _strike(episode, world, report):
    if episode.event == "kill":
        _later(episode.delay_s, _struck(report, signal.SIGKILL))
    elif episode.event == "stop":
        _later(episode.delay_s, _struck(report, signal.SIGSTOP))
    elif episode.event == "pause":
        _later(episode.delay_s, _pause_self)
    elif episode.event == "fork":
        _fork_children(world.group)
    elif episode.event == "raise":
        time.sleep(episode.delay_s)
        report("struck_at", time.monotonic())
        raise ValueError("the victim's program raises")


def _compile_at_once(world, is_victim):
    """Two programs compiled at the same time, the later one first on the victim; then both run."""
    scales = (2.0, 4.0)
    programs = [world.program(scale) for scale in scales]
    compiled = {}

    def compile_one(i, delay):
        time.sleep(delay)
        compiled[i] = programs[i].lower(world.x_dev, world.idx_dev).compile()

    delays = (0.05, 0.0) if is_victim else (0.0, 0.05)
    threads = [threading.Thread(target=compile_one, args=(i, delays[i])) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, scale in enumerate(scales):
        world.run(compiled[i], scale)


def _close(episode, world, is_victim, report):
    begin = time.monotonic()
    if is_victim and episode.event == "late close":
        time.sleep(PEER_TIMEOUT_S * 1.3)
    if is_victim and episode.event == "kill in close":
        _later(episode.delay_s, _struck(report, signal.SIGKILL))
        time.sleep(episode.delay_s * 0.9)
    world.group.close()
    if is_victim and episode.event == "kill in close":
        time.sleep(TIMEOUT_S)
    report("close", time.monotonic() - begin)
