"""Starts the native side of a group: greetings, layout, session.

Nothing here touches arrays. The session itself is C++ (xla_ffi/session.h).
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from jax_ep import _config, _env, _extension, _mesh
from jax_ep._group import Group
from jax_ep._runtime import bootstrap, cpu, gpu, topology
from jax_ep._runtime.session import NativeSession, close_at_exit

_BRIEF = 256  # characters of a text in a greeting


def start(group: Group, exchange: bootstrap.Exchange) -> NativeSession:
    """Allocates and connects the native side of `group`; collective over the mesh's processes.

    Raises:
        ValueError: configs differ between processes, or a field cannot be met here.
        MemoryError: too little shared memory; says how much was asked for.
        jax_ep.BootstrapError: another process failed, is gone, or did not take part.
    """
    core = _extension.load()
    close_at_exit()
    if group.platform == "cpu":
        cpu.warn_about_small_pool()
    name = f"{group._label}#{exchange.number}"
    exchange.label = f"group {name}"  # as _core quotes it
    exchange.timeout_s = group.config.timeout_s
    greetings = _greet(group, exchange)
    host = greetings[exchange.me]["host"]
    teams = _mesh.teams(group.mesh, group.axes)
    hosts = [[greetings[device.process_index]["host"] for device in team] for team in teams]
    node_size = topology.choose_node_size(group, hosts)
    layout = topology.layout_of(group, exchange.me, node_size)
    available = {name: (ok, reason) for name, ok, reason in core.transports()}
    transport = topology.choose_transport(
        group,
        num_nodes=group.num_ranks // node_size,
        one_process=exchange.alone,
        one_host=len({host for team in hosts for host in team}) == 1,
        available=available,
    )
    on_gpu = group.platform != "cpu"
    options = core.SessionOptions(
        session_id=group.session_id,
        name=name,
        shape=core.GroupShape(
            **_config.shape_arguments(
                group.config, group.num_ranks, node_size, group.partials == "float32"
            )
        ),
        team_processes=layout.team_processes,
        local_ranks=layout.local_ranks,
        host_ranks=[
            (t, r)
            for t, team in enumerate(hosts)
            for r, host_of_rank in enumerate(team)
            if host_of_rank == host
        ],
        process_index=exchange.me,
        transport=transport,
        timeout_s=group.config.timeout_s,
        peer_timeout_s=_config.peer_timeout_s(group.config),
        threads_per_rank=1 if on_gpu else cpu.threads_per_rank(greetings, host, teams),
        huge_pages=_env.flag("JAX_EP_HUGE_PAGES") is not False,
        debug=_env.flag("JAX_EP_DEBUG") is True,
    )
    if on_gpu:
        session = gpu.start(options, exchange, layout.devices, layout.mates)
    else:
        session = cpu.start(core.Session(options), exchange)
    try:
        return NativeSession(session, name, group, layout, transport)
    except BaseException as error:
        session.abort(f"process {exchange.me} failed in create_group: {error!r}")
        raise


def _greet(group: Group, exchange: bootstrap.Exchange) -> dict[int, Any]:
    """Tells the others what this process calls create_group with; what each process says."""
    hello = {
        "version": bootstrap.PROTOCOL_VERSION,
        "mesh": repr(list(group.mesh.shape.items())),
        "devices": _brief(repr([device.id for device in group.mesh.devices.flat])),
        "axis": list(group.axes),
        "config": repr(group.config),
        "number": group.number.value,
        "host": bootstrap.host_id(),
        "pid": os.getpid(),
        "cpus": cpu.ranges(os.sched_getaffinity(0)),
    }
    greetings = {process: record for process, (record, _) in exchange.share("hello", hello).items()}
    _check_greetings(exchange.label, greetings, exchange.me)
    group.number.agree(max(record["number"] for record in greetings.values()))
    exchange.watch(
        {p: record["pid"] for p, record in greetings.items() if record["host"] == hello["host"]}
    )
    return greetings


def _brief(text: str) -> str:
    """`text`, or of a long one its beginning and a hash: every process reads everybody's."""
    if len(text) <= _BRIEF:
        return text
    return f"{text[:_BRIEF]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _check_greetings(label: str, greetings: dict[int, Any], me: int) -> None:
    """Raises ValueError unless all processes have called create_group alike."""
    own = greetings[me]
    for process, record in greetings.items():
        for field in ("version", "mesh", "devices", "axis", "config"):
            if record.get(field) != own[field]:
                raise ValueError(
                    f"{label}: process {process} called create_group with {field} "
                    f"{record.get(field)}, this process ({me}) with {own[field]}; all processes "
                    "must pass the same"
                )
