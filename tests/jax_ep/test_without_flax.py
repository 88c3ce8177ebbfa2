"""Where Flax is not installed, importing jax_ep.flax says what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "flax":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
import MODULE
"""


@pytest.mark.parametrize("module", ["jax_ep.flax", "jax_ep.flax.linen"])
def test_the_error_names_the_command(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.replace("MODULE", module)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: jax_ep.flax needs Flax")
    assert "pip install 'jax_ep[flax]'" in last
    assert done.stderr.count("Traceback") == 1
