"""Trains a byte-level Mixture-of-Experts language model with expert parallelism.

    python -m jax_ep launch -n 4 examples/train_moe_lm.py

The text is the Python standard library's own sources.  The same script runs in one process with
several devices, in several processes, or alone on one device: ranks are devices.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jax_ep

try:
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils
    from moe_lm import checkpoint, report, text_data
    from moe_lm.model import ModelSize
    from moe_lm.training import AXIS, Trainer, TrainOptions, TrainState
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is missing; this example needs: pip install '.[examples]'")

HELD_OUT_WINDOWS = 128
LOAD_SAMPLES = 64  # columns of the heat map
WIRES = {"dtype": None, "fp8": jax_ep.FP8(), "fp8-ue8m0": jax_ep.FP8(scale="ue8m0")}
RUN_ONLY = {"out", "compare", "oracle", "checkpoint_dir", "resume", "seconds", "log_every", "write"}


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=500, help="optimizer steps (default %(default)s)")
    add("--seconds", type=float, help="stop in good order after this time, if not done before")
    add("--batch", type=int, default=16, help="sequences of the global batch")
    add("--length", type=int, default=128, help="bytes of a sequence")
    add("--width", type=int, default=128)
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--expert-width", type=int, default=256)
    add("--experts", type=int, default=8)
    add("--top-k", type=int, default=2)
    add("--capacity-factor", type=float, default=1.5)
    add("--learning-rate", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    add("--mode", choices=("auto", "ht", "ll"), default="auto")
    add("--node-size", type=int, help="ranks per (virtual) node")
    add("--transport", default="auto", help="between nodes: auto, loopback, shm, ...")
    add("--wire", choices=tuple(WIRES), default="dtype", help="what dispatched rows travel as")
    add("--oracle", action="store_true", help='run with implementation="xla": jax.lax only')
    add("--compare", type=Path, metavar="FILE", help="results.json of a run that must agree")
    add("--out", type=Path, default=Path("moe_lm_out"), help="folder for results, plots, model")
    add("--checkpoint-dir", type=Path, help="save the state here, at the end and now and then")
    add("--resume", action="store_true", help="go on from the newest checkpoint")
    add("--log-every", type=int, default=20)
    add("--write", type=int, default=64, help="bytes that the model writes on each rank at the end")
    options = parser.parse_args()
    if options.resume and options.checkpoint_dir is None:
        parser.error("--resume needs --checkpoint-dir")
    return options


def make_group(options: argparse.Namespace, mesh: Mesh) -> jax_ep.Group:
    """The expert-parallel group over all devices."""
    ranks = mesh.size
    for name, count in (("--experts", options.experts), ("--batch", options.batch)):
        if count % ranks:
            sys.exit(f"{name}: got {count}, expected a multiple of the {ranks} devices (ranks)")
    config = jax_ep.Config(
        num_experts=options.experts,
        top_k=options.top_k,
        hidden=options.width,
        max_tokens=options.batch // ranks * options.length,
        capacity_factor=options.capacity_factor,
        align=8,
        dtype=np.float32,
        mode=options.mode,
        node_size=options.node_size,
        transport=options.transport,
        wire=WIRES[options.wire],
    )
    return jax_ep.create_group(mesh, AXIS, config, implementation="xla" if options.oracle else None)


class Run:
    """One training run; every process executes the same steps."""

    def __init__(self, options: argparse.Namespace, mesh: Mesh, group: jax_ep.Group) -> None:
        self.options, self.group = options, group
        self.begin = time.monotonic()
        self.console = report.Console(jax.process_index() == 0, options.steps)
        self.console.say("reading the standard library, making the model")
        self.corpus = text_data.load_standard_library()
        self.size = ModelSize(
            width=options.width,
            layers=options.layers,
            heads=options.heads,
            expert_width=options.expert_width,
            num_experts=options.experts,
            top_k=options.top_k,
        )
        self.trainer = Trainer(
            mesh,
            group,
            self.size,
            TrainOptions(options.steps, options.learning_rate, options.seed),
        )
        windows = text_data.held_out_windows(self.corpus, HELD_OUT_WINDOWS, options.length)
        self.held_out = np.split(windows, range(options.batch, len(windows), options.batch))
        if len(self.held_out[-1]) < options.batch:
            del self.held_out[-1]
        self.results = report.Results(
            options={
                key: value
                for key, value in vars(options).items()
                if key not in RUN_ONLY | {"mode", "node_size", "transport"}
            },
            implementation="xla" if options.oracle else "native",
            bigram_loss=text_data.bigram_loss(self.corpus, np.concatenate(self.held_out)),
        )
        self.checkpoints = None
        if options.checkpoint_dir is not None:
            self.checkpoints = ocp.CheckpointManager(
                options.checkpoint_dir.resolve(),
                options=ocp.CheckpointManagerOptions(max_to_keep=2),
            )

    def introduce(self, state: TrainState) -> None:
        """Says what is trained on what."""
        say, options = self.console.say, self.options
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state[:2]))
        say(
            f"{parameters / 1e6:.2f} M parameters, {options.layers} layers of {options.experts} "
            f"experts (top {options.top_k}) on {self.group.num_ranks} ranks in "
            f"{jax.process_count()} processes, implementation {self.results.implementation}"
        )
        say(
            f"{self.corpus.num_files} files, {self.corpus.train.size / 1e6:.1f} MB to train on, "
            f"{self.corpus.held_out.size / 1e6:.2f} MB held out; "
            f"a bigram model's held-out loss is {self.results.bigram_loss:.3f} nats/byte"
        )

    def start(self) -> tuple[TrainState, int]:
        """The first state, or that of the newest checkpoint, and the step it is before."""
        state = self.trainer.init()
        newest = (
            self.checkpoints.latest_step() if self.checkpoints and self.options.resume else None
        )
        if newest is None:
            return state, 0
        saved = self.checkpoints.restore(
            newest,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(state), results=ocp.args.JsonRestore()
            ),
        )
        for name in ("losses", "held_out", "dropped", "load", "load_steps"):
            setattr(self.results, name, saved["results"][name])
        self.console.say(f"resumed before step {newest} from {self.options.checkpoint_dir}")
        return saved["state"], newest

    def save(self, state: TrainState, step: int) -> None:
        """Writes a checkpoint that starts before ``step``; collective over the processes."""
        if self.checkpoints is not None and self.checkpoints.latest_step() != step:
            history: dict[str, Any] = {
                name: getattr(self.results, name)
                for name in ("losses", "held_out", "dropped", "load", "load_steps")
            }
            self.checkpoints.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), results=ocp.args.JsonSave(history)
                ),
            )

    def evaluate(self, state: TrainState, step: int) -> float:
        """Held-out loss in nats per byte."""
        losses = [
            float(self.trainer.evaluate(state, self.trainer.shard_batch(tokens)))
            for tokens in self.held_out
        ]
        loss = float(np.mean(losses))
        self.results.held_out.append((step, loss))
        return loss

    def is_time_over(self, step: int) -> bool:
        """Whether --seconds have passed, by process 0's clock, so that all stop together."""
        if self.options.seconds is None or step % self.options.log_every:
            return False
        is_over = np.array(time.monotonic() - self.begin > self.options.seconds)
        return bool(multihost_utils.broadcast_one_to_all(is_over))

    def share_dropped(self, last_steps: int = 0) -> float:
        """Share of the (token, expert) pairs of the last steps, or of all, that were dropped."""
        options, counts = self.options, self.results.dropped[-last_steps:]
        pairs = options.batch * options.length * options.top_k * options.layers
        return sum(counts) / (pairs * max(1, len(counts)))

    def train(self) -> float:
        """Trains to the end and returns the final held-out loss."""
        options, say = self.options, self.console.say
        state, step = self.start()
        self.introduce(state)
        evaluate_every = max(1, options.steps // 8)
        sample_every = max(1, options.steps // LOAD_SAMPLES)
        tokens_per_step = options.batch * options.length
        all_time, meter = report.Meter(), report.Meter()
        is_first = True
        say("compiling the training step; the first one takes much longer than the others")
        while step < options.steps and not self.is_time_over(step):
            tokens = text_data.training_batch(
                self.corpus, options.seed, step, options.batch, options.length
            )
            state, measured = self.trainer.step(state, self.trainer.shard_batch(tokens))
            self.results.losses.append(float(measured.loss))  # waits: one step in flight
            self.group.check()
            self.results.dropped.append(int(measured.dropped))
            if step % sample_every == 0:
                self.results.load.append(np.asarray(measured.load).tolist())
                self.results.load_steps.append(step)
            step += 1
            if is_first:
                say(f"first step (with compilation) after {time.monotonic() - self.begin:.1f} s")
                all_time, meter, is_first = report.Meter(), report.Meter(), False
            else:
                all_time.add(tokens_per_step)
                meter.add(tokens_per_step)
            self.console.advance_to(step)
            if step % options.log_every == 0 or step == options.steps:
                self._say_progress(step, np.asarray(measured.load), meter.read())
            if step % evaluate_every == 0 and step < options.steps:
                loss = self.evaluate(state, step)
                say(f"step {step:5d}/{options.steps}  held-out loss {loss:.4f}")
                self.save(state, step)
        self.results.tokens_per_second = all_time.read()
        loss = self.evaluate(state, step)
        self.save(state, step)
        if self.checkpoints is not None:
            self.checkpoints.wait_until_finished()
            self.checkpoints.close()
        checkpoint.save(
            options.out / "model",
            checkpoint.Trained(self.size, options.length),
            state.dense,
            state.experts,
        )
        if options.write:
            self.write(state)
        return loss

    def write(self, state: TrainState) -> None:
        """Shows what the model writes: each rank goes on with a prompt, through all experts."""
        length = min(self.options.write, self.options.length)
        self.console.say(f"compiling again; then the model writes {length} bytes per rank:")
        prompts = text_data.prompts(self.group.num_ranks, length)
        written = self.trainer.write_on(state, *map(self.trainer.shard_batch, prompts))
        texts = multihost_utils.process_allgather(written, tiled=True)
        for text in texts[: len(text_data.PROMPTS)]:
            for line in text_data.readable(text).splitlines():
                self.console.say(f"| {line}".rstrip())
            self.console.say("|")

    def _say_progress(self, step: int, load: np.ndarray, rate: float) -> None:
        options = self.options
        recent = self.results.losses[-options.log_every :]
        dropped = self.share_dropped(options.log_every)
        bytes_left = (options.steps - step) * options.batch * options.length
        seconds_left = bytes_left / rate if rate else float("nan")
        share = load / load.sum(axis=1, keepdims=True) * options.experts
        self.console.say(
            f"step {step:5d}/{options.steps}  loss {np.mean(recent):.4f}  {rate:7,.0f} tokens/s  "
            f"expert load {share.min():.2f}-{share.max():.2f} x even  dropped {dropped:.2%}  "
            f"{seconds_left:.0f} s left"
        )


def main() -> int:
    """Runs the example; the exit code is 1 if ``--compare`` finds a difference."""
    options = parse_options()
    if not jax.distributed.is_initialized():
        jax_ep.initialize()
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    exit_code = 0
    with make_group(options, mesh) as group:
        run = Run(options, mesh, group)
        loss = run.train()
        run.console.close()
        if jax.process_index() == 0:
            options.out.mkdir(parents=True, exist_ok=True)
            run.results.save(options.out / "results.json")
            report.draw(run.results, options.out)
            print(
                f"{run.results.tokens_per_second:,.0f} tokens/s, "
                f"{run.share_dropped():.2%} of pairs dropped; results.json, loss.png, "
                f"expert_load.png and model are in {options.out}"
            )
            if options.compare is not None:
                is_equal, sentence = report.compare(
                    run.results, report.Results.load_from(options.compare)
                )
                print(f"{'same' if is_equal else 'DIFFERENT'}: {sentence}")
                exit_code = 0 if is_equal else 1
            bigram = run.results.bigram_loss
            verdict = "below" if loss < bigram else "NOT below"
            print(
                f"final held-out loss {loss:.3f} nats/byte, {verdict} the bigram model's "
                f"{bigram:.3f}, after {time.monotonic() - run.begin:.0f} s"
            )
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
