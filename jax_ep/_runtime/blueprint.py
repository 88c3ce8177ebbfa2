"""All that the sessions of a group are made from, but for who takes part in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jax_ep import _config, _env, _extension
from jax_ep._group import Group
from jax_ep._runtime import bootstrap, cpu, gpu
from jax_ep._runtime.topology import Layout


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """Made once, by create_group.

    Args:
        name: how messages quote the group.
        layout: who runs what, as this process sees it.
        hosts: which host each process is on.
        transport: between nodes.
        threads_per_rank: of this process.
    """

    name: str
    layout: Layout
    hosts: Mapping[int, str]
    transport: str
    threads_per_rank: int

    @property
    def node_size(self) -> int:
        """Ranks per node."""
        return self.layout.node_size

    def process_of(self, rank: int) -> int:
        """Which process runs that rank of a group of one team."""
        return self.layout.team_processes[0][rank]

    def active(self, processes: Collection[int]) -> Any:
        """i32[N], 1 for the ranks of those processes, in a group of one team."""
        return np.array([p in processes for p in self.layout.team_processes[0]], np.int32)

    def start(
        self,
        group: Group,
        exchange: bootstrap.Exchange,
        active: Any = None,
        generation: int = 0,
    ) -> Any:
        """A started native session of this process's ranks; collective over the processes.

        The arguments are those of `options`, with the exchange of those that take part. Raises as
        `gpu.start` does.
        """
        options = self.options(group, exchange.me, active, generation)
        if group.platform == "cpu":
            return cpu.start(_extension.load().Session(options), exchange)
        # Over "cuda" all processes, which share a host, map each other's memory.
        mates = set(self.hosts) if self.transport == "cuda" else self.layout.mates
        return gpu.start(options, exchange, self.layout.devices, mates)

    def options(self, group: Group, me: int, active: Any = None, generation: int = 0) -> Any:
        """The `_core.SessionOptions` of process `me`.

        Args:
            group: the group, with its number.
            me: this process's index.
            active: i32[N], of an elastic group: who takes part.
            generation: the number of that decision.
        """
        core = _extension.load()
        host = self.hosts[me]
        return core.SessionOptions(
            session_id=group.session_id,
            name=self.name,
            shape=core.GroupShape(
                **_config.shape_arguments(
                    group.config, group.num_ranks, self.node_size, group.partials == "float32"
                )
            ),
            team_processes=self.layout.team_processes,
            local_ranks=self.layout.local_ranks,
            host_ranks=[
                (t, r)
                for t, team in enumerate(self.layout.team_processes)
                for r, process in enumerate(team)
                if self.hosts[process] == host
            ],
            active=[] if active is None else active.tolist(),
            generation=generation,
            process_index=me,
            transport=self.transport,
            timeout_s=group.config.timeout_s,
            peer_timeout_s=_config.peer_timeout_s(group.config),
            threads_per_rank=self.threads_per_rank,
            huge_pages=_env.flag("JAX_EP_HUGE_PAGES") is not False,
            debug=_env.flag("JAX_EP_DEBUG") is True,
            gpu_direct=_env.flag("JAX_EP_GPU_DIRECT") is True,
        )
