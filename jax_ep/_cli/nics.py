"""``python -m jax_ep info --nics``: interfaces, RDMA ports, GPUs, providers, transports."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from jax_ep import _extension
from jax_ep._cli.sections import Row, print_sections
from jax_ep._cli.topology import distance_rows

_SYSFS = Path("/sys")
_NET = _SYSFS / "class" / "net"
_INFINIBAND = _SYSFS / "class" / "infiniband"
_ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_FI_INFO_TIMEOUT_S = 20


def nics() -> int:
    """Prints one section per subject; returns 0."""
    print_sections(
        {
            "interfaces (JAX_EP_SOCKET_IFNAME)": list(interfaces()),
            f"RDMA ports (JAX_EP_VERBS_DEVICE), from {_verbs_source()}": list(rdma_ports()),
            "GPUs, and how near RDMA devices are": list(distance_rows(_SYSFS)),
            "libfabric providers (JAX_EP_OFI_PROVIDER) and domains": list(_providers()),
            "network transports": list(_transports()),
        }
    )
    return 0


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip()
    return ""


def _numa(device: Path) -> str:
    node = _read(device / "numa_node")
    return f"NUMA node {node}" if node not in ("", "-1") else "NUMA unknown"


def _pci(device: Path) -> str:
    real = Path(os.path.realpath(device))  # of the device, or of a function below it
    found = next((path for path in (real, *real.parents) if path.name.count(":") == 2), None)
    return f"PCI {found.name}" if found else "no PCI device"


def interfaces() -> Iterator[Row]:
    """Network interfaces: state, speed, place."""
    for _, name in sorted(socket.if_nameindex()):
        folder = _NET / name
        speed = _read(folder / "speed")
        yield (
            name,
            ", ".join(
                part
                for part in (
                    _read(folder / "operstate") or "unknown",
                    f"{speed} Mbit/s" if speed.isdigit() else "",
                    f"MTU {_read(folder / 'mtu')}",
                    _pci(folder / "device"),
                    _numa(folder / "device"),
                )
                if part
            ),
        )


def _verbs_devices() -> list[str] | None:
    """Names that pyverbs lists; None where it cannot be imported."""
    try:
        verbs = importlib.import_module("pyverbs.device")
        errors = importlib.import_module("pyverbs.pyverbs_error")
    except ImportError:
        return None
    try:
        return sorted(device.name.decode() for device in verbs.get_device_list())
    except errors.PyverbsRDMAError:  # the kernel has no RDMA at all
        return []


def _verbs_source() -> str:
    return "sysfs (pyverbs is not installed)" if _verbs_devices() is None else "pyverbs and sysfs"


def rdma_ports() -> Iterator[Row]:
    """Ports of RDMA devices; rows of their GIDs begin with two spaces."""
    names = _verbs_devices()
    if names is None:
        names = sorted(os.listdir(_INFINIBAND)) if _INFINIBAND.exists() else []
    for name in names:
        device = _INFINIBAND / name
        for port in sorted((device / "ports").glob("*")):
            state = _read(port / "state").partition(":")[2].strip().lower()
            link = _read(port / "link_layer")
            rate = _read(port / "rate")
            parts = [state, link, rate, _pci(device / "device"), _numa(device / "device")]
            yield f"{name}:{port.name}", ", ".join(part for part in parts if part)
            for gid in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
                address = _read(gid)
                if address in ("", _ZERO_GID):
                    continue
                kind = _read(port / "gid_attrs" / "types" / gid.name)
                yield f"  GID {gid.name}", f"{address} {kind}".strip()


def _providers() -> Iterator[Row]:
    tool = shutil.which("fi_info")
    if tool is None:
        yield "(unknown)", "fi_info is not installed (Debian: libfabric-bin)"
        return
    try:
        done = subprocess.run(
            [tool, "-t", "FI_EP_RDM", "-c", "FI_RMA"],
            capture_output=True,
            text=True,
            timeout=_FI_INFO_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield "(unknown)", f"fi_info: {error}"
        return
    domains: dict[str, list[str]] = {}
    provider = ""
    for line in done.stdout.splitlines():
        key, _, value = line.strip().partition(": ")
        if key == "provider":
            provider = value
        elif key == "domain" and value not in domains.setdefault(provider, []):
            domains[provider].append(value)
    for name, values in domains.items():
        yield name, ", ".join(values)


def _transports() -> Iterator[Row]:
    try:
        core = _extension.load()
    except ImportError as error:
        yield "jax_ep._core", f"cannot be loaded: {error}"
        return
    for name, is_available, reason in core.transports():
        if name in ("ofi", "verbs"):
            yield name, ("available: " if is_available else "not available: ") + reason
