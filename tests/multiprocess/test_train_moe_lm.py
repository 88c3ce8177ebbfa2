"""The training example, small: it learns, resumes exactly, and both implementations agree."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import children
import numpy as np
import pytest

pytestmark = pytest.mark.multiprocess

for package in ("flax", "optax", "orbax.checkpoint", "rich", "matplotlib"):
    pytest.importorskip(package)

LIMIT_S = 500.0
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ("--width=32", "--layers=1", "--heads=2", "--expert-width=32", "--batch=8", "--length=32")


def _train(out: Path, *options: str, launch: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jax_ep", "launch", *launch.split()]
    command += [str(EXAMPLES / "train_moe_lm.py"), *SMALL, "--out", str(out), *options]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**children.quick(), "JAX_PLATFORMS": "cpu"},
        check=False,
    )


def _only(lines: list[str], word: str) -> str:
    found = [line for line in lines if word in line]
    assert len(found) == 1, (word, lines)
    return found[0]


def _results(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


@pytest.mark.ci
@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    whole, half, rest = (tmp_path / name for name in ("whole", "half", "rest"))
    options = ("--oracle", "--steps", "16", "--checkpoint-dir")
    done = _train(whole, *options, str(tmp_path / "a"), launch="-n 1 -D 2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "final held-out loss" in lines[-1]
    assert any("compiling" in line for line in lines[: lines.index(_only(lines, "first step"))])
    assert re.search(r"step +16/16 .*dropped +\d+\.\d+%.*0 s left", _only(lines, "16/16"))
    assert re.search(r"\d\.\d+% of pairs dropped", done.stdout)
    at = lines.index(_only(lines, "then the model writes"))
    samples = "\n".join(lines[at + 1 : -1])
    assert samples.count("[0] | ") >= 2  # one prompt on each rank
    assert "| import " in samples and "| def " in samples
    assert (whole / "loss.png").exists() and (whole / "expert_load.png").exists()
    losses = _results(whole)["losses"]
    assert len(losses) == 16 and losses[-1] < losses[0]

    # The newest checkpoint but one is from the middle: make it the newest.
    steps = sorted(int(path.name) for path in (tmp_path / "a").iterdir() if path.name.isdigit())
    assert steps == [14, 16]
    (tmp_path / "a" / "16").rename(half)
    done = _train(rest, *options, str(tmp_path / "a"), "--resume", launch="-n 1 -D 2")
    assert done.returncode == 0, done.stderr
    assert "resumed before step 14" in done.stdout
    assert _results(rest)["losses"] == losses


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_ep._core") is None, reason="no native extension")
def test_native_and_xla_train_the_same_model(tmp_path):
    options = ("--steps", "24", "--capacity-factor", "1.0")  # so that pairs are dropped
    done = _train(tmp_path / "xla", "--oracle", *options, launch="-n 1 -D 4")
    assert done.returncode == 0, done.stderr
    assert sum(_results(tmp_path / "xla")["dropped"]) > 0
    against = ("--compare", str(tmp_path / "xla" / "results.json"))
    done = _train(tmp_path / "native", *options, *against, launch="-n 4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same: native against xla" in done.stdout
    assert _results(tmp_path / "native")["dropped"] == _results(tmp_path / "xla")["dropped"]


def test_a_number_of_ranks_that_does_not_divide_is_refused(tmp_path):
    done = _train(tmp_path, "--oracle", launch="-n 1 -D 3")
    assert done.returncode == 1
    assert "expected a multiple of the 3 devices" in done.stderr


def test_what_the_model_writes_cannot_steer_a_terminal(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from moe_lm import text_data

    tokens, lengths = text_data.prompts(5, 8)
    assert tokens.shape == (5, 8) and lengths.tolist()[:2] == [4, 7]
    assert text_data.readable(tokens[0]) == "def"
    written = np.frombuffer(b"a\x1b[2J\xff\tb\n c\n\n\0rest", np.uint8).astype(np.int32)
    assert text_data.readable(written) == "a?[2J\ufffd?b\n c"


class TestCompare:
    def test_it_fails_on_other_losses_and_other_options(self, monkeypatch):
        monkeypatch.syspath_prepend(str(EXAMPLES))
        from moe_lm import report

        def results(loss: float, **options: int) -> report.Results:
            return report.Results(options, "xla", 2.5, losses=[loss] * 30, held_out=[(30, loss)])

        assert report.compare(results(2.0), results(2.0))[0]
        assert report.compare(results(2.0), results(2.00001))[0]
        assert not report.compare(results(2.0), results(2.0001))[0]
        is_equal, sentence = report.compare(results(2.0, steps=1), results(2.0, steps=2))
        assert not is_equal and "different options: steps" in sentence
