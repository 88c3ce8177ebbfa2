"""What create_group refuses of elastic groups on GPUs; needs none."""

from __future__ import annotations

import pathlib

import pytest

from jax_ep._runtime import gpu

OFF = "--xla_gpu_shard_autotuning=false"


@pytest.mark.parametrize(
    "flags", [OFF, f"--xla_a=b {OFF}", "--xla_gpu_shard_autotuning=0", f"{OFF[:-5]}True {OFF}"]
)
def test_compilations_that_need_nobody_are_taken(
    flags: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    gpu.check_elastic(4, 4, 4)
    file = tmp_path / "flags"
    file.write_text(flags.replace(" ", "\n"))
    monkeypatch.setenv("XLA_FLAGS", str(file))
    gpu.check_elastic(4, 4, 4)


@pytest.mark.parametrize(
    "flags", ["", "--xla_a=b", "--xla_gpu_shard_autotuning", f"{OFF} {OFF[:-5]}true", "/no/file"]
)
def test_compilations_that_wait_for_all_processes_are_refused(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(ValueError, match="expected --xla_gpu_shard_autotuning=false in XLA_FLAGS"):
        gpu.check_elastic(4, 4, 2)
    gpu.check_elastic(4, 4, 1)  # it waits for nobody


def test_several_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="with 2 of 4 ranks in a node, expected all"):
        gpu.check_elastic(4, 2, 2)
