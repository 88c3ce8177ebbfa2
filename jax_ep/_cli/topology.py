"""How near GPUs and NICs are: what the transports choose NICs by, in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jax_ep import _extension

# In the order of Distance in proxy/base/topology.h; the words of `nvidia-smi topo`.
DISTANCES = (
    "same switch (PIX)",
    "several switches (PXB)",
    "same host bridge (PHB)",
    "same NUMA node (NODE)",
    "far or unknown (SYS)",
)


def distance_rows(sysfs: Path) -> Iterator[tuple[str, str]]:
    """For each GPU, the RDMA devices of this host by distance."""
    try:
        core = _extension.load()
    except ImportError as error:
        yield "jax_ep._core", f"cannot be loaded: {error}"
        return
    nics = sorted(path.name for path in (sysfs / "class" / "infiniband").glob("*"))
    for gpu, distances in core.gpu_distances(str(sysfs), nics):
        parts = []
        for distance, words in enumerate(DISTANCES):
            names = [nic for nic, of in zip(nics, distances, strict=True) if of == distance]
            if names:
                parts.append(f"{words}: {', '.join(names)}")
        yield gpu, "; ".join(parts) or "this host has no RDMA device"
