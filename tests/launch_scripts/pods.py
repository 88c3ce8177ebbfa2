"""Runs the pods of jobset.yaml as processes: `unshare ... python pods.py FOLDER [OPTIONS]`.

Started in a network and mount namespace of its own, where it can be what a cluster is to a pod:
the API server, the names of the other pods, and the service account's files under /var/run. What
runs in the pods is the manifest's own command with JAX's own detection. Not a container: processes
and /dev/shm are shared, and volumes are folders of FOLDER.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import subprocess
import sys
from pathlib import Path

import yaml
from kubernetes_api import NAMESPACE, ApiServer, JobSetObjects
from scripts import LAUNCH, LIMIT_S, ROOT, environment

SECRETS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN = "token-of-the-service-account"
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(control, SIOCGIFFLAGS, request))
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def prepare_machine(folder: Path, objects: JobSetObjects) -> Path:
    """Names and secrets, visible in this mount namespace only; returns the server's PEM file."""
    bring_loopback_up()
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {socket.gethostname()}\n" + objects.hosts_file())
    mount("--bind", hosts, "/etc/hosts")
    mount("-t", "tmpfs", "tmpfs", "/var/run")
    SECRETS.mkdir(parents=True)
    (SECRETS / "namespace").write_text(NAMESPACE)
    (SECRETS / "token").write_text(TOKEN)
    pem = folder / "server.pem"
    create = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    create += ["-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1"]
    create += ["-keyout", str(folder / "key.pem"), "-out", str(SECRETS / "ca.crt")]
    subprocess.run(create, check=True, stderr=subprocess.DEVNULL)
    pem.write_text((folder / "key.pem").read_text() + (SECRETS / "ca.crt").read_text())
    return pem


def command_of(container: dict, folder: Path) -> list[str]:
    """The container's own, its mounted folders replaced by this machine's."""
    places = {"/venv/bin/python": sys.executable, "/checkpoints": str(folder / "checkpoints")}
    assert container["workingDir"] == "/jax_ep"
    return [places.get(word, word) for word in (*container["command"], *container["args"])]


def main() -> int:
    folder, options = Path(sys.argv[1]), sys.argv[2:]
    documents = list(yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text()))
    by_kind = {document["kind"]: document for document in documents}
    count = by_kind["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"]
    objects = JobSetObjects(by_kind["JobSet"], [f"127.0.0.{2 + i}" for i in range(count)])
    certificate = prepare_machine(folder, objects)
    server = ApiServer(objects, by_kind["Role"], TOKEN, str(certificate))
    (container,) = objects.pod_spec["containers"]
    pods = []
    for index in range(count):
        env = environment(
            HOSTNAME=objects.hostname(index),
            KUBERNETES_SERVICE_HOST="127.0.0.1",
            KUBERNETES_SERVICE_PORT=server.port,
            JOB_COMPLETION_INDEX=index,
        )
        command = [*command_of(container, folder), *options]
        pods.append(subprocess.Popen(command, cwd=ROOT, env=env))
    try:
        codes = [pod.wait(LIMIT_S) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
        server.close()
    (folder / "asked.json").write_text(json.dumps(sorted(server.asked)))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
