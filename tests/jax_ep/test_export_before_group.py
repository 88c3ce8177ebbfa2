"""A program that runs before its group exists: the error says to call create_group first."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

import jax_ep
from jax_ep._session_number import SessionNumber

SETUP = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 2)
import jax_ep
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.device_put(jnp.zeros((8, 1), jnp.int32), NamedSharding(mesh, P("ep")))

def create(mesh, num_experts):
    sizes = dict(num_experts=num_experts, top_k=1, hidden=8, max_tokens=4)
    return jax_ep.create_group(mesh, "ep", jax_ep.Config(**sizes, dtype=jnp.float32))

def step_of(group):
    plan = lambda i: jax_ep.plan(group, i).send_slot
    return jax.jit(jax.shard_map(plan, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
"""
WRITE = """
program = jax.export.export(step_of(create(mesh, 4)), disabled_checks=jax_ep.export_checks())(x)
open(sys.argv[1], "wb").write(program.serialize())
"""
READ = """
step = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read())).call
"""
FIRST = "create(mesh, 4)\n"
OTHER = "create(mesh, 8)\n"
RUN = "print(jax.block_until_ready(step(x)).shape)\n"
COMPILE = "jax.jit(step).lower(x).compile()\n"
ABSTRACT = "step = step_of(create(AbstractMesh((2,), ('ep',)), 4))\n"

FIX = "call jax_ep.create_group"


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "32"}
    return subprocess.run(
        [sys.executable, "-c", SETUP + code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("jax_ep._core")
    path = str(tmp_path_factory.mktemp("export") / "program.bin")
    done = python(WRITE, path)
    assert done.returncode == 0, done.stderr
    return path


# What is caught below is printed as Python prints it where nobody catches it.
ATTEMPT = """
import traceback
def attempt(name, code):
    try:
        exec(code, globals())
    except Exception:
        print("ATTEMPT", name, traceback.format_exc())
"""
NOBODY = """
f = lambda x: jax.ffi.ffi_call('nobody', jax.ShapeDtypeStruct((), 'f4'))()
jax.jit(f).lower(x).compile()
"""


@pytest.fixture(scope="module")
def errors(program: str) -> dict[str, str]:
    """What one process is told, before it has any group and then with another one."""
    attempts = {
        "compile": COMPILE,
        "nobody": NOBODY,
        "lowering-only": ABSTRACT + RUN,
        "other": READ + OTHER + RUN,
    }
    code = "".join(f"attempt({name!r}, {code!r})\n" for name, code in attempts.items())
    done = python(READ + ATTEMPT + code, program)
    assert done.returncode == 0, done.stderr
    parts = (part.partition(" ") for part in done.stdout.split("ATTEMPT ")[1:])
    told = {name: text for name, _, text in parts}
    assert told.keys() == attempts.keys(), done.stdout
    return told


def test_before_create_group(program: str) -> None:
    done = python(READ + RUN, program)
    assert done.returncode == 1
    assert "jax_ep: got a program with operations of jax_ep" in done.stderr
    assert FIX in done.stderr


def test_compiled_before_create_group(errors: dict[str, str]) -> None:
    assert "jax_ep: got a program with operations of jax_ep" in errors["compile"]
    assert FIX in errors["compile"]


def test_of_a_lowering_only_group(errors: dict[str, str]) -> None:
    assert "lowering-only" in errors["lowering-only"] and FIX in errors["lowering-only"]


def test_of_a_group_that_is_not_here(errors: dict[str, str]) -> None:
    assert "got a program of group id" in errors["other"] and FIX in errors["other"]
    assert "expected one of those that this process has: ep[2]#1" in errors["other"]


def test_errors_of_other_programs_stay_as_they_are(errors: dict[str, str]) -> None:
    assert "nobody" in errors["nobody"] and "jax_ep: got" not in errors["nobody"]


def test_after_create_group(program: str) -> None:
    done = python(READ + FIRST + RUN, program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(8, 1)"


def test_a_session_has_the_id_that_it_had_before_configs_had_more_fields() -> None:
    """Else programs that were exported by an older version do not find their group."""
    mesh = types.SimpleNamespace(shape={"ep": 4})
    config = jax_ep.Config(num_experts=8, top_k=2, hidden=64, max_tokens=32)
    number = SessionNumber(mesh, ("ep",), config, lowering_only=True)
    number.value = 0
    assert number.session_id == -6185908652525910546  # of 9f38ce7
