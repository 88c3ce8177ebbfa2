"""Several hosts on one machine: network namespaces joined by a bridge.

Each host has an address 10.77.0.(number + 1) on eth0, and a hostname, /etc/hosts, /dev/shm,
System V IPC and boot id of its own: neither shared memory nor a host id joins two of them.

As a script it runs a command on every host, with NODE_RANK, NODE_COUNT, NODE_IP and NODE0_IP set:

    python tests/netns/hosts.py -n 2 -- ip addr

With --job the command joins them as one JAX job, a process on each host.
"""

import argparse
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid

_ENTER = """
set -e
hostname "node$NODE_RANK"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$NODE_FILES/hosts" /etc/hosts
mount --bind "$NODE_FILES/boot_id.$NODE_RANK" /proc/sys/kernel/random/boot_id
unset NODE_FILES
exec "$@"
"""


def as_job(command, port):
    """`command` as a member of a job with one process on each host."""
    script = (
        f"export JAX_COORDINATOR_ADDRESS=$NODE0_IP:{port} JAX_NUM_PROCESSES=$NODE_COUNT "
        'JAX_PROCESS_ID=$NODE_RANK JAX_EP_SOCKET_IFNAME=eth0; exec "$@"'
    )
    return ["bash", "-c", script, "job", *command]


def missing():
    """Why there can be no hosts on this machine, or ''."""
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"no command {tool} (Debian: iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root here"
    probe = f"jaxep-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode == 0:
        # Some kernels have namespaces but no veth or bridge.
        made = subprocess.run(
            ["ip", "-n", probe, "link", "add", "br0", "type", "bridge"],
            capture_output=True,
            text=True,
        )
    if made.returncode == 0:
        made = subprocess.run(
            ["ip", "-n", probe, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1"],
            capture_output=True,
            text=True,
        )
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return "" if made.returncode == 0 else f"no network namespaces: {made.stderr.strip()}"


class Host:
    """One host and the one command that it runs."""

    def __init__(self, number, namespace):
        self.number = number
        self.address = f"10.77.0.{number + 1}"
        self.namespace = namespace
        self.process = None
        self.lines = []
        self._more = threading.Condition()
        self._reader = None

    def read(self, echo):
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()
            if echo:
                print(f"[{self.number}] {line}", end="", flush=True)
        with self._more:
            self._more.notify_all()

    def text(self):
        return "\n".join(self.lines)

    def await_line(self, start, timeout):
        """The rest of the first line that begins with `start`."""
        deadline = time.monotonic() + timeout
        with self._more:
            while True:
                for line in self.lines:
                    if line.startswith(start):
                        return line[len(start) :].strip()
                left = deadline - time.monotonic()
                ended = self.process.poll() is not None and not self._reader.is_alive()
                if left <= 0 or ended:
                    raise AssertionError(f"host {self.number} never said {start!r}:\n{self.text()}")
                self._more.wait(min(left, 0.5))


class Hosts:
    """A context manager; leaving it kills everything that still runs and removes the hosts."""

    def __init__(self, count, echo=False):
        self._id = f"jaxep{os.getpid()}"
        self._switch = f"{self._id}-sw"
        self._echo = echo
        self._files = None
        self.hosts = [Host(i, f"{self._id}-{i}") for i in range(count)]

    def __enter__(self):
        self._files = pathlib.Path(tempfile.mkdtemp())
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _build(self):
        self._ip("netns", "add", self._switch)
        self._ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        self._ip("-n", self._switch, "link", "set", "br0", "up")
        names = ["127.0.0.1 localhost"]
        for host in self.hosts:
            port = f"port{host.number}"
            self._ip("netns", "add", host.namespace)
            link = ("link", "add", port, "type", "veth", "peer", "name", "eth0")
            self._ip("-n", self._switch, *link, "netns", host.namespace)
            self._ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
            self._ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            self._ip("-n", host.namespace, "link", "set", "eth0", "up")
            self._ip("-n", host.namespace, "link", "set", "lo", "up")
            names.append(f"{host.address} node{host.number}")
            (self._files / f"boot_id.{host.number}").write_text(f"{uuid.uuid4()}\n")
        (self._files / "hosts").write_text("\n".join(names) + "\n")

    def __exit__(self, *_):
        for host in self.hosts:
            self.kill(host.number)
        for namespace in [*(host.namespace for host in self.hosts), self._switch]:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
        shutil.rmtree(self._files, ignore_errors=True)

    @staticmethod
    def _ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    def start(self, command, env=None, only=None):
        """Runs `command` on every host (or those in `only`)."""
        for host in self.hosts:
            if only is not None and host.number not in only:
                continue
            own = {
                **os.environ,
                **(env or {}),
                "NODE_FILES": str(self._files),
                "NODE_RANK": str(host.number),
                "NODE_COUNT": str(len(self.hosts)),
                "NODE_IP": host.address,
                "NODE0_IP": self.hosts[0].address,
            }
            enter = ["unshare", "--mount", "--uts", "--ipc", "bash", "-c", _ENTER, "enter"]
            host.process = subprocess.Popen(
                ["ip", "netns", "exec", host.namespace, *enter, *map(str, command)],
                env=own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            host._reader = threading.Thread(target=host.read, args=(self._echo,), daemon=True)
            host._reader.start()

    def wait(self, timeout):
        """Exit codes by host; kills what still runs at the end of `timeout` (its code is None)."""
        deadline = time.monotonic() + timeout
        codes = []
        for host in self.hosts:
            try:
                codes.append(host.process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
                self.kill(host.number)
            host._reader.join(60)
        return codes

    def text(self):
        return "\n".join(f"[{host.number}] {line}" for host in self.hosts for line in host.lines)

    def kill(self, number):
        """Kills the processes of a host; its kernel closes their connections."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.hosts[number].namespace], capture_output=True, text=True
        )
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def cut(self, number):
        """Pulls the cable out of the switch: from here on no packet, no FIN, no RST."""
        self._ip("-n", self._switch, "link", "set", f"port{number}", "down")

    def heal(self, number):
        self._ip("-n", self._switch, "link", "set", f"port{number}", "up")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2, help="hosts")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--job", type=int, metavar="PORT", help="of the job's coordinator")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command")
    if reason := missing():
        sys.exit(reason)
    with Hosts(options.n, echo=True) as hosts:
        hosts.start(command if options.job is None else as_job(command, options.job))
        codes = hosts.wait(options.timeout)
    for number, code in enumerate(codes):
        if code != 0:
            print(f"host {number}: " + ("timeout" if code is None else f"exit {code}"))
    return 0 if all(code == 0 for code in codes) else 1


if __name__ == "__main__":
    sys.exit(main())
