"""What a report says of its machine and its versions: rows of a name and a value, for people."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import jax_ep
from jax_ep import _extension
from jax_ep._cli.info import GIB, transports, versions
from jax_ep._cli.nics import interfaces, rdma_ports

_TOOL_LIMIT_S = 20


def machine() -> dict[str, str]:
    """CPU, memory, GPUs, kernel and networks of this host. Starts no back end of JAX."""
    rows = {
        "CPU": _cpu(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} for this process",
        "memory": _memory(),
        "GPUs": _gpus(),
        "kernel": f"{platform.system()} {platform.release()} ({platform.machine()})",
    }
    nets = [f"{name} ({value})" for name, value in interfaces() if name != "lo"]
    rows["network interfaces"] = "; ".join(nets) or "loopback alone"
    ports = [f"{name} ({value})" for name, value in rdma_ports() if not name.startswith("  ")]
    rows["RDMA ports"] = "; ".join(ports) or "none"
    for name, value in transports()[1]:
        if name.startswith("transport"):
            rows[name] = value
    return rows


def package_versions() -> dict[str, str]:
    """Versions of the packages, of libfabric, and the commit of jax_ep where it is known."""
    rows = dict(versions())
    rows["libfabric"] = _libfabric()
    rows["commit of jax_ep"] = commit() or "not known: not a checkout"
    return rows


def commit() -> str:
    """The commit of a checkout or of pip's git URL; "" where jax_ep comes from a wheel."""
    folder = Path(jax_ep.__file__).resolve().parents[1]
    if (folder / ".git").exists():
        found = _output("git", "-C", str(folder), "rev-parse", "HEAD")
        changed = _output("git", "-C", str(folder), "status", "--porcelain", "-uno")
        return found + " with changes" * bool(found and changed)
    try:
        url = importlib.metadata.distribution("jax_ep").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return str(json.loads(url or "{}").get("vcs_info", {}).get("commit_id", ""))


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    kib = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0])
    return f"{kib * 1024 / GIB:.1f} GiB"


def _gpus() -> str:
    query = "--query-gpu=name,memory.total,driver_version"
    lines = _output("nvidia-smi", query, "--format=csv,noheader").splitlines()
    kinds = {line: lines.count(line) for line in lines}
    texts = []
    for line, count in kinds.items():
        name, _, rest = line.partition(", ")
        memory, _, driver = rest.partition(", ")
        texts.append(f"{count} x {name}, {memory}, driver {driver}" if driver else line)
    return "; ".join(texts) or "none that nvidia-smi shows"


def _libfabric() -> str:
    try:
        found: dict[str, str] = {n: reason for n, _, reason in _extension.load().transports()}
    except ImportError:
        return "not known: no native extension"
    return found.get("ofi", "not built in")


def _output(*command: str) -> str:
    """Its output, or "" if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
