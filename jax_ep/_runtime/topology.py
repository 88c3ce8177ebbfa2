"""Who runs what: the ranks of every process, their nodes, and the transport between nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_ep import _mesh
from jax_ep._group import Group


@dataclasses.dataclass(frozen=True)
class Layout:
    """Who runs what: the same on every process, but for the local fields."""

    team_processes: list[list[int]]
    devices: list[Any]  # of this process, in the order of local_ranks
    local_ranks: list[tuple[int, int, int]]  # (how the FFI names the device, team, rank)
    node_size: int

    @property
    def mates(self) -> set[int]:
        """Processes with a rank in a node of one of this process's ranks, itself included."""
        mates = set()
        for _, team, rank in self.local_ranks:
            first = rank // self.node_size * self.node_size
            mates.update(self.team_processes[team][first : first + self.node_size])
        return mates


def layout_of(group: Group, process: int, node_size: int) -> Layout:
    """The layout as `process` sees it."""
    teams = _mesh.teams(group.mesh, group.axes)
    local = [
        (device, t, r)
        for t, team in enumerate(teams)
        for r, device in enumerate(team)
        if device.process_index == process
    ]
    return Layout(
        team_processes=[[int(device.process_index) for device in team] for team in teams],
        devices=[device for device, _, _ in local],
        local_ranks=[(_ordinal(device), t, r) for device, t, r in local],
        node_size=node_size,
    )


def _ordinal(device: Any) -> int:
    """How the FFI names a device of this process."""
    return int(device.id if device.platform == "cpu" else device.local_hardware_id)


def _common_block(hosts: list[list[str]], num_ranks: int) -> int:
    """Largest divisor S of num_ranks such that ranks [i*S, (i+1)*S) share a host in every team."""
    for size in sorted((s for s in range(1, num_ranks + 1) if num_ranks % s == 0), reverse=True):
        blocks = (team[i : i + size] for team in hosts for i in range(0, num_ranks, size))
        if all(len(set(block)) == 1 for block in blocks):
            return size
    return 1


def choose_node_size(group: Group, hosts: list[list[str]]) -> int:
    """Ranks per node of a group whose ranks are on `hosts`, by team.

    Raises:
        ValueError: Config.node_size does not divide the ranks, or asks for memory across hosts.
    """
    largest = _common_block(hosts, group.num_ranks)
    wanted = group.config.node_size
    if wanted is None:
        return largest
    if group.num_ranks % wanted:
        raise ValueError(
            f"Config.node_size: got {wanted}, expected a divisor of the group's {group.num_ranks} "
            "ranks; use one of "
            + ", ".join(str(s) for s in range(1, group.num_ranks + 1) if group.num_ranks % s == 0)
        )
    blocks = (team[i : i + wanted] for team in hosts for i in range(0, group.num_ranks, wanted))
    if any(len(set(block)) > 1 for block in blocks):
        raise ValueError(
            f"Config.node_size: got {wanted}, but some {wanted} consecutive ranks do not share a "
            f"host; use at most {largest}, or None"
        )
    return wanted


def choose_transport(
    group: Group,
    *,
    num_nodes: int,
    one_process: bool,
    one_host: bool,
    on_gpu: bool,
    look: Callable[[str], dict[str, tuple[bool, str]]],
) -> str:
    """The transport between nodes; "none" where there is one node.

    `look(name)` says whether a transport can be used here, and if not, why; `look("")` of all. It
    opens what is a network, so none is looked at that is not needed.

    Raises:
        ValueError: Config.transport cannot be used here, or "auto" finds none.
    """
    wanted = group.config.transport
    if wanted == "auto":
        if num_nodes == 1:
            return "none"
        candidates = (["loopback"] if one_process else []) + (["shm"] if one_host else [])
        candidates += ["verbs", "ofi"]
        available: dict[str, tuple[bool, str]] = {}
        for name in candidates:
            available |= look(name)
            if available.get(name, (False, ""))[0]:
                return name
        reasons = "; ".join(f"{name}: {reason}" for name, (_, reason) in available.items())
        raise ValueError(
            f"Config.transport='auto' found no transport between the {num_nodes} nodes of "
            f"{group!r}: {reasons}"
        )
    usable, reason = look(wanted).get(wanted, (False, "unknown"))
    if not usable:
        others = [
            repr(name)
            for name, (ok, _) in look("").items()
            if ok and (name != "cuda" or group.platform == "gpu")
        ]
        raise ValueError(
            f"Config.transport: got {wanted!r}, which is not available here ({reason}); use "
            f"'auto' or one of {', '.join(others)}"
        )
    if wanted == "loopback" and not one_process:
        raise ValueError(
            "Config.transport: got 'loopback', which joins ranks of one process, but the mesh "
            "spans several; use 'shm' on one host, or 'auto'"
        )
    if wanted == "shm" and one_process and num_nodes > 1:
        raise ValueError(
            "Config.transport: got 'shm', which joins processes, but the mesh has the devices of "
            "one process only; use 'loopback' or 'auto'"
        )
    if wanted == "cuda" and not on_gpu:
        raise ValueError(
            "Config.transport: got 'cuda', which joins GPUs, but the mesh has none; use 'auto'"
        )
    if wanted in ("shm", "cuda") and not one_host:
        raise ValueError(
            f"Config.transport: got {wanted!r}, which joins processes of one host, but the mesh "
            "spans several hosts; use 'auto'"
        )
    return wanted if num_nodes > 1 else "none"
