"""What a launched job is: its options, and what follows from them for each process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from jax_ep._launch.address import split_address

DEFAULT_GRACE_S = 60.0
# Below it 8 virtual devices were seen to deadlock XLA:CPU (its own all_to_all).
MIN_POOL_THREADS = 32
POOL_THREADS_PER_DEVICE = 4
BINDINGS = ("none", "core")


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """What to start: ``command`` is a script, or with is_module a module's name, and its arguments.

    With gpus_per_process G > 0, process i gets GPUs i*G to i*G + G - 1: it uses those of all that
    it sees, or with hide_other_gpus it sees no others. With bind_to "core" each process runs on its
    share of the cores only, or on one of them if there are fewer cores than processes. With
    keep_going only process 0 decides when and how the job ends, and each of the others is started
    again up to ``restarts`` times when it fails.

    With ``coordinator`` this launcher runs JAX's coordination service in a process of its own, so
    that process 0 is like the others: the first one to end well decides. With a coordinator_address
    several launchers share a job of ``job_processes``: each starts num_processes of them, from
    first_process on, and one of them has ``coordinator``.
    """

    num_processes: int
    command: Sequence[str]
    is_module: bool = False
    devices_per_process: int = 1
    gpus_per_process: int = 0
    hide_other_gpus: bool = False
    bind_to: str = "none"
    grace_s: float = DEFAULT_GRACE_S
    keep_going: bool = False
    restarts: int = 0
    coordinator: bool = False
    coordinator_address: str | None = None
    job_processes: int = 0  # 0: num_processes
    first_process: int = 0

    @property
    def has_coordinator(self) -> bool:
        """Whether the coordination service is in no process of the job."""
        return self.coordinator or self.coordinator_address is not None

    @property
    def has_others(self) -> bool:
        """Whether the job has processes that this launcher does not start."""
        return self.job_processes > self.num_processes

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise ValueError(f"-n: got {self.num_processes}, expected at least one process")
        if self.devices_per_process < 1:
            raise ValueError(
                f"--devices-per-process: got {self.devices_per_process}, expected at least 1"
            )
        if self.gpus_per_process < 0:
            raise ValueError(f"--gpus-per-process: got {self.gpus_per_process}, expected >= 0")
        if self.hide_other_gpus and not self.gpus_per_process:
            raise ValueError("--hide-other-gpus: expected --gpus-per-process too")
        if self.bind_to not in BINDINGS:
            raise ValueError(f"--bind-to: got {self.bind_to!r}, expected one of {BINDINGS}")
        if not 0 <= self.grace_s < math.inf:
            raise ValueError(f"--grace: got {self.grace_s}, expected seconds >= 0")
        if self.restarts < 0:
            raise ValueError(f"--restarts: got {self.restarts}, expected >= 0")
        if self.restarts and not self.keep_going:
            raise ValueError("--restarts: expected --keep-going too, or the job ends first")
        self._check_coordinator()
        if not self.command:
            raise ValueError(
                "expected a script, or -m and a module, after the options; got neither"
            )
        name = self.command[0]
        if self.is_module and (not all(name.split(".")) or "/" in name or name.endswith(".py")):
            raise ValueError(f"-m: {name!r} is not the name of a module, such as package.module")
        if not self.is_module and not Path(name).is_file():
            raise ValueError(f"script: {name!r} is not a file")

    def _check_coordinator(self) -> None:
        if self.coordinator_address is None:
            if self.job_processes or self.first_process:
                raise ValueError(
                    "--job-processes, --first-process: expected --coordinator-address too, at "
                    "which the processes of other launchers reach the coordinator"
                )
        else:
            try:
                split_address(self.coordinator_address)
            except ValueError as error:
                raise ValueError(f"--coordinator-address: {error}") from None
        end = self.first_process + self.num_processes
        if not self.job_processes:
            object.__setattr__(self, "job_processes", self.num_processes)
        if self.first_process < 0 or self.job_processes < end:
            raise ValueError(
                f"got processes {self.first_process} to {end - 1} (--first-process, -n), expected "
                f"them to be among the {self.job_processes} of the job, which begin with 0 "
                "(--job-processes)"
            )


def child_environment(base: Mapping[str, str], devices_per_process: int) -> dict[str, str]:
    """The environment of a child: what the user set stays, except the device count asked for."""
    env = dict(base)
    env.setdefault("PYTHONUNBUFFERED", "1")
    if devices_per_process > 1:
        kept = [
            flag
            for flag in env.get("XLA_FLAGS", "").split()
            if not flag.startswith("--xla_force_host_platform_device_count")
        ]
        kept.append(f"--xla_force_host_platform_device_count={devices_per_process}")
        env["XLA_FLAGS"] = " ".join(kept)
        env.setdefault(
            "NPROC", str(max(MIN_POOL_THREADS, POOL_THREADS_PER_DEVICE * devices_per_process))
        )
    return env


def gpus_of(options: LaunchOptions, index: int) -> list[int] | None:
    """The GPUs of this launcher's process `index`, or None: JAX's own choice."""
    count = options.gpus_per_process
    return list(range(index * count, (index + 1) * count)) if count else None


def cores_of(index: int, num_processes: int, cores: Sequence[int]) -> list[int]:
    """The share of process `index`: equal runs of `cores`, or one of them in equal turns."""
    begin = index * len(cores) // num_processes
    end = (index + 1) * len(cores) // num_processes
    return list(cores[begin : max(end, begin + 1)])
