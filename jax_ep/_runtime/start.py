"""Starts the native side of a group: greetings, layout, session.

Nothing here touches arrays. The session itself is C++ (xla_ffi/session.h).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from typing import Any

from jax_ep import _config, _extension, _mesh
from jax_ep._group import Group
from jax_ep._runtime import bootstrap, cpu, elsewhere, gpu, topology
from jax_ep._runtime.agreement import Member
from jax_ep._runtime.blueprint import Blueprint
from jax_ep._runtime.elastic import Elastic, refuse_if_ended
from jax_ep._runtime.group_store import GroupStore
from jax_ep._runtime.session import NativeSession, close_at_exit

_BRIEF = 256  # characters of a text in a greeting


def start(group: Group, exchange: bootstrap.Exchange) -> NativeSession:
    """Allocates and connects the native side of `group`; collective over the mesh's processes.

    Raises:
        ValueError: configs differ between processes, or a field cannot be met here.
        MemoryError: too little shared memory; says how much was asked for.
        jax_ep.BootstrapError: another process failed, is gone, or did not take part.
    """
    name = f"{group._label}#{exchange.number}"
    with elsewhere.shown("create_group", name):
        return _start(group, exchange, name)


def _start(group: Group, exchange: bootstrap.Exchange, name: str) -> NativeSession:
    core = _extension.load()
    close_at_exit()
    if group.platform == "cpu":
        cpu.warn_about_small_pool()
    exchange.label = f"group {name}"  # as _core quotes it
    exchange.timeout_s = group.config.timeout_s
    exchange.peer_timeout_s = _config.peer_timeout_s(group.config)
    store = exchange.group_store()
    if store is not None and (again := _find_again(group, exchange, store)) is not None:
        return again
    hello = _hello(group)
    greetings = _greet(group, exchange, hello)
    hosts = {process: record["host"] for process, record in greetings.items()}
    teams = _mesh.teams(group.mesh, group.axes)
    team_hosts = [[hosts[device.process_index] for device in team] for team in teams]
    node_size = topology.choose_node_size(group, team_hosts)
    on_gpu = group.platform != "cpu"
    if on_gpu and group.config.elastic:
        gpu.check_elastic(group.num_ranks, node_size, len(greetings))
    layout = topology.layout_of(group, exchange.me, node_size)
    transport = topology.choose_transport(
        group,
        num_nodes=group.num_ranks // node_size,
        one_process=exchange.alone,
        one_host=len({host for team in team_hosts for host in team}) == 1,
        on_gpu=on_gpu,
        look=lambda name: {n: (ok, reason) for n, ok, reason in core.transports(name)},
    )
    threads = 1 if on_gpu else cpu.threads_per_rank(greetings, hosts[exchange.me], teams)
    blueprint = Blueprint(name, layout, hosts, transport, threads)
    elastic = None
    if group.config.elastic:
        elastic = Elastic(store, group, exchange.me, blueprint, hello["life"])
    session = blueprint.start(group, exchange, None if elastic is None else elastic.active)
    try:
        if elastic is not None:
            members = {
                p: Member(said["life"], said["pid"], said["host"]) for p, said in greetings.items()
            }
            kept = {name: hello[name] for name in _ALIKE}
            elastic.begin(
                members,
                {
                    "alike": kept,
                    "number": group.number.value,
                    "hosts": hosts,
                    "node_size": node_size,
                    "transport": transport,
                    "threads": threads,
                },
            )
        return NativeSession(session, name, group, layout, transport, elastic)
    except BaseException as error:
        session.abort(f"process {exchange.me} failed in create_group: {error!r}")
        if elastic is not None:
            elastic.close()
        raise


def _find_again(
    group: Group, exchange: bootstrap.Exchange, store: GroupStore
) -> NativeSession | None:
    """The session of a process that was started again, if the others have an elastic group.

    Raises:
        jax_ep.BootstrapError: they had one, and have closed it.
        Others: as _start_again.
    """
    if group.config.elastic:
        refuse_if_ended(store, exchange.label, exchange.me)
    record = store.get("group")
    if record is None:
        return None
    try:
        return _start_again(group, exchange, store, record)
    except BaseException:
        exchange.uncount()  # the next call is for this group, too
        raise


def _start_again(
    group: Group, exchange: bootstrap.Exchange, store: GroupStore, record: dict[str, Any]
) -> NativeSession:
    """For a process that was started again: the others have this group, and are to admit it.

    Raises:
        ValueError: it does not call create_group as they did, or is on another host than before.
        RuntimeError: none of them lives.
        TimeoutError: they did not admit it within timeout_s.
    """
    hello = _hello(group)
    me = exchange.me
    _check_alike(exchange.label, hello, record["alike"], "the group was created")
    hosts = {int(process): host for process, host in record["hosts"].items()}
    if hosts[me] != hello["host"] and (record["node_size"] > 1 or record["transport"] == "shm"):
        raise ValueError(
            f"{exchange.label}: process {me} was started again on another host, where it does not "
            "share memory with its node-mates; start it on the one that it was on"
        )
    hosts[me] = hello["host"]
    if group.platform != "cpu":
        gpu.check_elastic(group.num_ranks, record["node_size"], len(hosts))
    group.number.agree(record["number"])
    layout = topology.layout_of(group, me, record["node_size"])
    blueprint = Blueprint(
        exchange.label.removeprefix("group "), layout, hosts, record["transport"], record["threads"]
    )
    elastic = Elastic(store, group, me, blueprint, hello["life"])
    session = elastic.join(time.monotonic() + group.config.timeout_s)
    return NativeSession(session, blueprint.name, group, layout, blueprint.transport, elastic)


# What all processes call create_group with alike.
_ALIKE = ("version", "mesh", "devices", "axis", "config")


def _hello(group: Group) -> dict[str, Any]:
    """What this process tells the others of itself and its call."""
    return {
        "version": bootstrap.PROTOCOL_VERSION,
        "mesh": repr(list(group.mesh.shape.items())),
        "devices": _brief(repr([device.id for device in group.mesh.devices.flat])),
        "axis": list(group.axes),
        "config": repr(group.config),
        "number": group.number.value,
        "host": bootstrap.host_id(),
        "pid": os.getpid(),
        "cpus": cpu.ranges(os.sched_getaffinity(0)),
        "life": secrets.token_hex(8),
    }


def _greet(group: Group, exchange: bootstrap.Exchange, hello: dict[str, Any]) -> dict[int, Any]:
    """Tells the others `hello`; what each process says."""
    greetings = {process: record for process, (record, _) in exchange.share("hello", hello).items()}
    for process, record in greetings.items():
        caller = f"process {process} called create_group"
        _check_alike(exchange.label, greetings[exchange.me], record, caller, exchange.me)
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


def _check_alike(label: str, own: Any, other: Any, caller: str, me: int | None = None) -> None:
    """Raises ValueError unless `caller`, who said `other`, called create_group as this process."""
    this = "this process" if me is None else f"this process ({me})"
    for field in _ALIKE:
        if other.get(field) != own[field]:
            theirs, ours = _differing(str(other.get(field)), str(own[field]))
            raise ValueError(
                f"{label}: {caller} with {field} {theirs}, {this} with {ours}; all processes must "
                "pass the same"
            )


def _differing(text: str, other: str) -> tuple[str, str]:
    """Of two configs the fields that differ; other texts as they are."""
    fields, others = _fields(text), _fields(other)
    if len(fields) != len(others) or len(fields) == 1:
        return text, other
    differ = [both for both in zip(fields, others, strict=True) if both[0] != both[1]]
    return ", ".join(a for a, _ in differ), ", ".join(b for _, b in differ)


def _fields(text: str) -> list[str]:
    """Of a dataclass's repr each "name=value", whose value may be such a repr; else the text."""
    _, _, inner = text.removesuffix(")").partition("(")
    if not text.endswith(")") or not inner:
        return [text]
    fields, depth = [""], 0
    for character in inner:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            fields.append("")
        else:
            fields[-1] += character
    return [field.strip() for field in fields]
