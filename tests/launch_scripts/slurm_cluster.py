"""A real SLURM of one node, of this machine and user, that lives as long as a `with` block.

Needs no systemd, munge, cgroups or configuration in /etc: daemons in the foreground, trust in
everybody who can connect (so: tests only), tasks found by walking /proc.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

TOOLS = ("slurmctld", "slurmd", "sinfo", "sbatch", "srun")
START_LIMIT_S = 120.0
STOP_LIMIT_S = 20.0


def missing() -> str:
    """What is not installed, or nothing."""
    absent = [tool for tool in TOOLS if _find(tool) is None]
    return f"no {', '.join(absent)} (Debian: slurmctld slurmd slurm-client)" if absent else ""


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to whoever asks for any: nobody is given them meanwhile."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found


def _configuration(folder: Path, cpus: int) -> str:
    host, user = socket.gethostname().split(".")[0], getpass.getuser()
    # JAX takes its coordinator's port from the job's number.
    first_job = random.randrange(1, 4096)
    controller_port, node_port = _free_ports(2)
    return f"""
ClusterName=jax_ep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
FirstJobId={first_job}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def slurm_cluster(folder: Path, cpus: int) -> Iterator[dict[str, str]]:
    """Starts the daemons; yields what the commands need in their environment.

    Args:
        folder: empty, for configuration, state and logs.
        cpus: what the node claims to have.

    Raises:
        RuntimeError: the node is not ready in time; with the daemons' logs.
    """
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(_configuration(folder, cpus))
    env = {"SLURM_CONF": str(folder / "slurm.conf")}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in (("slurmctld", "-D"), ("slurmd", "-D", "-N", "localhost")):
            with open(folder / f"{command[0]}.log", "wb") as log:
                daemons.append(
                    subprocess.Popen(
                        [str(_find(command[0])), *command[1:]],
                        env=os.environ | env,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        _wait_until_idle(folder, env)
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _wait_until_idle(folder: Path, env: dict[str, str]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        asked = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"],
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=START_LIMIT_S,
            check=False,
        )
        if asked.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    logs = "\n".join(log.read_text()[-2000:] for log in sorted(folder.glob("*.log")))
    raise RuntimeError(f"SLURM is not ready after {START_LIMIT_S:.0f} s:\n{asked.stderr}\n{logs}")


def wait_for_job(job: str, env: dict[str, str], limit_s: float) -> int:
    """Exit code of a job when it has ended (`sbatch --wait` looks only every 10 s or so).

    Args:
        job: its number, as `sbatch --parsable` prints it.
        env: whole environment of the commands.
        limit_s: for the job, whatever it does.

    Raises:
        TimeoutError: the job did not end.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        asked = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,  # the controller may be too busy to answer
        )
        shown = asked.stdout
        if asked.returncode == 0 and not re.search(
            r" JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING) ", shown
        ):
            code, killed_by = map(int, re.findall(r" ExitCode=(\d+):(\d+)", shown)[0])
            return code or 128 * bool(killed_by) + killed_by
        time.sleep(0.2)
    raise TimeoutError(f"job {job} did not end within {limit_s:.0f} s: {shown}")
