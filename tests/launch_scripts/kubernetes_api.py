"""An API server that has one JobSet's pods and Job, as the JobSet controller would make them.

It serves what JAX asks for, over TLS, and refuses what the manifest's Role does not grant.
"""

from __future__ import annotations

import json
import re
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMESPACE = "default"
_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/v1)/namespaces/(?P<namespace>[^/]+)"
    r"/(?P<resource>[^/]+)(?:/(?P<name>[^/]+))?"
)


class JobSetObjects:
    """Names, Job and pods of the first replicated job of a JobSet."""

    def __init__(self, jobset: dict[str, Any], addresses: list[str]) -> None:
        """Args: the manifest, and an IP for each pod."""
        replicated = jobset["spec"]["replicatedJobs"][0]
        self.jobset_name = jobset["metadata"]["name"]
        self.job_name = f"{self.jobset_name}-{replicated['name']}-0"
        self.addresses = addresses
        labels = {"jobset.sigs.k8s.io/jobset-name": self.jobset_name}
        spec = replicated["template"]["spec"]
        self.pod_spec = spec["template"]["spec"]
        self.job = {"metadata": {"name": self.job_name, "labels": labels}, "spec": spec}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self.job_name, "uid": "1"}
        self.pods = [
            {
                "metadata": {
                    "name": f"{self.hostname(index)}-xxxxx",
                    "labels": {"job-name": self.job_name, **labels},
                    "ownerReferences": [{**owner, "controller": True}],
                },
                "spec": {**self.pod_spec, "subdomain": self.jobset_name},
                "status": {"podIP": address},
            }
            for index, address in enumerate(addresses)
        ]

    def hostname(self, index: int) -> str:
        """Of the pod with this completion index."""
        return f"{self.job_name}-{index}"

    def hosts_file(self) -> str:
        """What the cluster's DNS answers: each pod by its name, and below the JobSet's."""
        return "".join(
            f"{address} {self.hostname(index)}.{self.jobset_name} {self.hostname(index)}\n"
            for index, address in enumerate(self.addresses)
        )


class ApiServer:
    """Runs in a thread of its own until `close`; `asked` has every (group, resource, verb)."""

    def __init__(self, objects: JobSetObjects, role: dict[str, Any], token: str, certificate: str):
        """Args: what is served, the Role, the bearer token, a PEM file with key and certificate."""
        self.asked: set[tuple[str, str, str]] = set()
        self._objects, self._token = objects, token
        self._granted = granted(role)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                authorization = self.headers.get("Authorization", "")
                code, body = outer._answer(self.path, authorization)
                text = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str, authorization: str) -> tuple[int, dict[str, Any]]:
        url = urlsplit(path)
        match = _PATH.fullmatch(url.path)
        if match is None or match["namespace"] != NAMESPACE:
            return 404, {"reason": "NotFound"}
        verb = "list" if match["name"] is None else "get"
        asked = (match["group"] or "", match["resource"], verb)
        self.asked.add(asked)
        if authorization.lower() != f"bearer {self._token}".lower():
            return 401, {"reason": "Unauthorized"}
        if asked not in self._granted:
            return 403, {"reason": "Forbidden"}
        if asked == ("", "pods", "list"):
            (selector,) = parse_qs(url.query)["fieldSelector"]
            field, _, value = selector.partition("=")
            assert field == "status.podIP", selector
            found = [pod for pod in self._objects.pods if pod["status"]["podIP"] == value]
            return 200, {"kind": "PodList", "apiVersion": "v1", "items": found}
        if asked == ("batch", "jobs", "get") and match["name"] == self._objects.job_name:
            return 200, {"kind": "Job", "apiVersion": "batch/v1", **self._objects.job}
        return 404, {"reason": "NotFound"}


def granted(role: dict[str, Any]) -> set[tuple[str, str, str]]:
    """Every (group, resource, verb) of a Role."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
