"""Where the GPU library is: beside the extension, or in the package jax_ep_cuda13."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from jax_ep import _extension
from jax_ep._version import __version__

PACKAGE = "jax_ep_cuda13"
FILE = "libjax_ep_gpu.so"


def path() -> str:
    """The library of this installation, or where it would stand if there is none.

    A build from source puts it beside the extension; that one comes first.

    Raises:
        NotImplementedError: jax_ep_cuda13 is of another version than jax_ep.
    """
    beside = Path(_extension.load().__file__).parent / FILE
    if beside.exists():
        return str(beside)
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return str(beside)
    found = importlib.metadata.version(PACKAGE)
    if found != __version__:
        raise NotImplementedError(
            f"the GPU library: got {PACKAGE} {found}, expected {__version__}, as jax_ep is; run "
            f"`pip install {PACKAGE}=={__version__}`, or pass implementation='xla'"
        )
    return str(Path(spec.submodule_search_locations[0]) / FILE)
