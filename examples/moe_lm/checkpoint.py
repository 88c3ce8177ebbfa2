"""A trained model as a folder: `model.json` says its sizes, `parameters` holds logical experts.

Expert e is row e of its arrays, wherever it was trained, so the folder loads on any number of
ranks.  All processes must see the folder.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from moe_lm.model import ModelSize

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Trained:
    """What `model.json` says: the sizes, and over how many bytes the model was trained to look."""

    size: ModelSize
    length: int


def save(folder: Path, trained: Trained, dense: Any, experts: Any) -> None:
    """Writes the model in place of what the folder held; collective over the processes.

    Args:
        folder: made where it is missing.
        trained: sizes.
        dense: replicated parameters, a tree of global arrays.
        experts: the experts' parameters, a tree of global arrays [E, ...].
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        parameters = {"dense": dense, "experts": experts}
        checkpointer.save((folder / "parameters").resolve(), parameters, force=True)
    if jax.process_index() == 0:
        about = {"format": FORMAT, "length": trained.length}
        about |= {"size": dataclasses.asdict(trained.size)}
        (folder / "model.json").write_text(json.dumps(about, indent=1) + "\n")


def load_sizes(folder: Path) -> Trained:
    """Reads `model.json`; SystemExit says what to do where there is no model."""
    path = folder / "model.json"
    try:
        about = json.loads(path.read_text())
    except FileNotFoundError:
        raise SystemExit(
            f"{path} is missing; train a model first: "
            "python -m jax_ep launch -n 4 examples/train_moe_lm.py"
        ) from None
    if about["format"] != FORMAT:
        raise SystemExit(f"{path}: got format {about['format']}, expected {FORMAT}; train again")
    return Trained(ModelSize(**about["size"]), about["length"])


def load_parameters(folder: Path, dense: Any, experts: Any) -> tuple[Any, Any]:
    """(dense, experts) of the folder, as NumPy arrays of this process.

    No process waits for another one: one that was started again reads alone.  `dense` and `experts`
    are trees with the shapes and dtypes of the model, as `nnx.split` gives.
    """
    like = {"dense": dense, "experts": experts}
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process {me}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        loaded = checkpointer.restore(
            (folder / "parameters").resolve(),
            args=ocp.args.PyTreeRestore(
                item=like,
                restore_args=jax.tree.map(
                    lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), like
                ),
            ),
        )
    return loaded["dense"], loaded["experts"]
