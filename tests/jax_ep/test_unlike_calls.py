"""What create_group says where processes call it differently."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

import jax_ep
from jax_ep._runtime import start

CONFIG = jax_ep.Config(
    num_experts=8, top_k=2, hidden=64, max_tokens=32, dtype=jnp.float32, wire=jax_ep.FP8(32)
)


def called_with(**fields: Any) -> dict[str, Any]:
    """A greeting of a process with these fields of its Config."""
    config = repr(dataclasses.replace(CONFIG, **fields))
    return {"version": 7, "mesh": "[('ep', 2)]", "devices": "[0, 1]", "axis": "ep"} | {
        "config": config
    }


def test_the_fields_that_differ_are_named_and_no_others() -> None:
    others = called_with(hidden=32, align=4)
    with pytest.raises(ValueError) as caught:
        start._check_alike("group moe", called_with(), others, "process 1 called create_group", 0)
    default = CONFIG.align
    assert str(caught.value) == (
        "group moe: process 1 called create_group with config hidden=32, align=4, this process (0) "
        f"with hidden=64, align={default}; all processes must pass the same"
    )


def test_what_is_no_config_is_shown_whole() -> None:
    with pytest.raises(
        ValueError, match=r"with mesh \[\('ep', 4\)\], this process with \[\('ep', 2"
    ):
        start._check_alike(
            "group moe", called_with(), called_with() | {"mesh": "[('ep', 4)]"}, "process 1"
        )
    start._check_alike("group moe", called_with(), called_with(), "process 1")
