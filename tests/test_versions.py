"""One binary serves every supported jax: it is built against the oldest of them."""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _versions(requirements, name, sign):
    return [line.removeprefix(name + sign) for line in requirements if line.startswith(name + sign)]


def test_the_build_takes_the_headers_of_the_oldest_supported_jaxlib():
    (built,) = _versions(PROJECT["tool"]["scikit-build"]["build"]["requires"], "jaxlib", "==")
    needed = PROJECT["project"]["dependencies"]
    assert _versions(needed, "jaxlib", ">=") == _versions(needed, "jax", ">=") == [built]
    cmake = (ROOT / "xla_ffi/CMakeLists.txt").read_text(encoding="utf-8")
    assert re.search(rf"JAX_EP_FFI_API_MINOR \d+\)  # of jaxlib {re.escape(built)},", cmake)
