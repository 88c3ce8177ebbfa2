"""How near GPUs and NICs are, from sysfs: what proxy/transport/topology.h tells the transports."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]+:[0-9a-f]+")
_PCI_ADDRESS = re.compile(r"[0-9a-f]+:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_GPU_VENDORS = ("0x10de", "0x1002")  # NVIDIA, AMD
# VGA, 3D and other display controllers; AMD's compute-only GPUs are "processing accelerators".
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")

# Nearest first, with the words of `nvidia-smi topo`.
DISTANCES = (
    "same switch (PIX)",
    "several switches (PXB)",
    "same host bridge (PHB)",
    "same NUMA node (NODE)",
    "far or unknown (SYS)",
)


def read(path: Path) -> str:
    """The text of a sysfs file; empty where there is none."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip()
    return ""


def pci_device(device: Path) -> Path | None:
    """The folder of the PCI device that `device` leads to or is below; None if there is none."""
    real = Path(os.path.realpath(device))
    return next((p for p in (real, *real.parents) if _PCI_ADDRESS.fullmatch(p.name)), None)


def _path(device: Path | None) -> list[str]:
    """Host bridge, bridges and the device itself."""
    parts = device.parts if device else ()
    return [p for p in parts if _HOST_BRIDGE.fullmatch(p) or _PCI_ADDRESS.fullmatch(p)]


def distance(a: Path, b: Path) -> str:
    """One of DISTANCES, between two devices' folders."""
    devices = pci_device(a), pci_device(b)
    paths = [_path(device) for device in devices]
    common = list(takewhile(lambda pair: pair[0] == pair[1], zip(*paths, strict=False)))
    if common:
        if _HOST_BRIDGE.fullmatch(common[-1][0]):
            return DISTANCES[2]
        # Below the common bridge: at most one more (the switch's port) and the device itself.
        return DISTANCES[0 if max(map(len, paths)) - len(common) <= 2 else 1]
    nodes = {read(device / "numa_node") if device else "-1" for device in devices}
    return DISTANCES[3 if len(nodes) == 1 and not nodes & {"", "-1"} else 4]


def gpus(sysfs: Path) -> list[Path]:
    """Folders of the GPUs of this host, in PCI order."""
    return [
        device
        for device in sorted((sysfs / "bus" / "pci" / "devices").glob("*"))
        if read(device / "vendor") in _GPU_VENDORS
        and read(device / "class").startswith(_GPU_CLASSES)
    ]


def distance_rows(sysfs: Path) -> Iterator[tuple[str, str]]:
    """For each GPU, the RDMA devices of this host by distance."""
    nics = sorted((sysfs / "class" / "infiniband").glob("*"))
    for gpu in gpus(sysfs):
        by_distance: dict[str, list[str]] = {words: [] for words in DISTANCES}
        for nic in nics:
            by_distance[distance(gpu, nic / "device")].append(nic.name)
        yield (
            gpu.name,
            "; ".join(
                f"{words}: {', '.join(names)}" for words, names in by_distance.items() if names
            )
            or "this host has no RDMA device",
        )
