"""examples/launch/jobset.yaml is valid, its Role is what JAX needs, and its pods train."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import LAUNCH, OPTIONS, check_trained, run

yaml = pytest.importorskip("yaml", reason="no PyYAML (pip install '.[test]')")
jsonschema = pytest.importorskip("jsonschema", reason="no jsonschema (pip install '.[test]')")
pytest.importorskip("kubernetes", reason="no kubernetes client (pip install '.[test]')")

from jobset_schema import JOBSET  # noqa: E402
from kubernetes import client  # noqa: E402
from kubernetes_api import granted  # noqa: E402

NAMESPACES = ("unshare", "--map-root-user", "--mount", "--net")


@pytest.fixture(scope="module")
def documents():
    return list(yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text()))


@pytest.fixture
def jobset(documents):
    (found,) = (document for document in documents if document["kind"] == "JobSet")
    return found


def parse(value: object, kind: str, where: str) -> object:
    """`value` as a `kind` of the Kubernetes API; fails on unknown, missing and mistyped fields."""
    if kind.lower().startswith("list["):
        assert isinstance(value, list), f"{where} is no list"
        return [parse(item, kind[5:-1], f"{where}[{i}]") for i, item in enumerate(value)]
    if kind.lower().startswith("dict"):
        assert isinstance(value, dict), f"{where} is no map"
        return value
    if kind in ("str", "int", "bool"):
        assert type(value).__name__ == kind, f"{where}: {value!r} is no {kind}"
        return value
    model = getattr(client, kind)
    fields = {name: field for field, name in model.attribute_map.items()}
    assert isinstance(value, dict), f"{where} is no {kind}"
    assert value.keys() <= fields.keys(), f"{where}: {value.keys() - fields.keys()} unknown"
    types = model.openapi_types
    return model(
        **{fields[n]: parse(v, types[fields[n]], f"{where}.{n}") for n, v in value.items()}
    )


def check_jobset(jobset: dict) -> None:
    jsonschema.validate(jobset, JOBSET)
    for replicated in jobset["spec"]["replicatedJobs"]:
        parse(replicated["template"]["spec"], "V1JobSpec", f"job {replicated['name']}")


_POD = ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec")


class TestManifest:
    def test_the_jobset_is_valid(self, jobset):
        check_jobset(jobset)

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            (("spec", "replicatedJob"), []),
            (("spec", "failurePolicy", "maxRestarts"), "3"),
            (("spec", "replicatedJobs", 0, "name"), "Train"),
            (("spec", "replicatedJobs", 0, "template", "spec", "parallel"), 2),
            (("spec", "replicatedJobs", 0, "template", "spec", "completions"), "2"),
            (("spec", "replicatedJobs", 0, "template", "spec", "template"), None),
            ((*_POD, "restartPolicies"), "Never"),
            ((*_POD, "containers", 0, "volumeMounts", 0), {"name": "checkpoints"}),
        ],
    )
    def test_the_validation_finds_errors(self, jobset, path, value):
        wrong = json.loads(json.dumps(jobset))
        place = wrong
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        with pytest.raises((AssertionError, ValueError, jsonschema.ValidationError)):
            check_jobset(wrong)

    def test_the_other_objects_are_valid_and_refer_to_each_other(self, documents, jobset):
        kinds = {"ServiceAccount": "V1ServiceAccount", "Role": "V1Role"}
        kinds["RoleBinding"] = "V1RoleBinding"
        others = {d["kind"]: d for d in documents if d is not jobset}
        assert others.keys() == kinds.keys()
        for kind, document in others.items():
            parse(document, kinds[kind], kind)
        account = others["ServiceAccount"]["metadata"]["name"]
        assert [subject["name"] for subject in others["RoleBinding"]["subjects"]] == [account]
        assert others["RoleBinding"]["roleRef"]["name"] == others["Role"]["metadata"]["name"]
        (replicated,) = jobset["spec"]["replicatedJobs"]
        job = replicated["template"]["spec"]
        assert job["template"]["spec"]["serviceAccountName"] == account
        # JAX: the pod's index is the rank, and one Job's parallelism the number of processes.
        assert job["completionMode"] == "Indexed" and replicated.get("replicas", 1) == 1
        assert job["parallelism"] == job["completions"] > 1

    def test_it_installs_the_client_that_jax_needs(self, jobset):
        pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        (install,) = pod["initContainers"]
        assert "pip install" in install["args"][0] and "'jax[k8s]'" in install["args"][0]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in (*pod["initContainers"], *pod["containers"]):
            assert {mounted["name"] for mounted in container["volumeMounts"]} <= volumes


def _cannot_run_pods() -> str:
    for tool in ("unshare", "openssl", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode:
        return "this user may not create namespaces"
    return ""


@pytest.mark.ci
@pytest.mark.multiprocess
def test_the_pods_find_each_other_by_the_role_and_train(documents, tmp_path):
    if reason := _cannot_run_pods():
        pytest.skip(reason)
    pods = Path(__file__).with_name("pods.py")
    output = run(*NAMESPACES, sys.executable, pods, tmp_path, *OPTIONS, "--out", tmp_path / "out")
    check_trained(output)
    assert (tmp_path / "checkpoints" / "2").is_dir()
    (role,) = (document for document in documents if document["kind"] == "Role")
    asked = {tuple(request) for request in json.loads((tmp_path / "asked.json").read_text())}
    assert asked == granted(role), "the Role grants what JAX asks for, and no more"
