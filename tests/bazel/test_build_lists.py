"""CMake and Bazel compile the same files into the same targets, and no file is left out by both."""

import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("proxy", "kernels/cpu", "xla_ffi", "tests/proxy", "tests/kernels", "tests/xla_ffi")
TIMEOUT_S = 600

Targets = dict[str, frozenset[str]]


def _missing() -> str:
    for tool in ("bazel", "cmake"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (docs/development.md)"
    if importlib.util.find_spec("nanobind") is None:
        return "nanobind is not installed, without which CMake cannot configure the extension"
    if not pathlib.Path("/usr/include/gtest/gtest.h").exists():
        return "GoogleTest is not installed (Debian: apt-get install libgtest-dev)"
    return ""


pytestmark = [
    pytest.mark.skipif(bool(_missing()), reason=_missing() or "nothing is missing"),
    pytest.mark.timeout(3 * TIMEOUT_S),
]


def _run(*command: object) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def cmake_targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    """By CMake's own account of the configured build (its file API)."""
    build = tmp_path_factory.mktemp("cmake")
    api = build / ".cmake" / "api" / "v1"
    (api / "query").mkdir(parents=True)
    (api / "query" / "codemodel-v2").touch()
    options = ["-DJAX_EP_BUILD_TESTS=ON", "-DJAX_EP_GPU=none"]
    options += [f"-DPython_EXECUTABLE={sys.executable}"]
    _run("cmake", "-S", ROOT, "-B", build, *options)
    targets: Targets = {}
    for path in (api / "reply").glob("target-*.json"):
        target = json.loads(path.read_text())
        sources = {source["path"] for source in target.get("sources", ())}
        ours = frozenset(p for p in sources if p.endswith(".cc") and not p.startswith("/"))
        if ours:
            targets[target["name"]] = ours
    return targets


@pytest.fixture(scope="module")
def bazel_targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    """By Bazel's own account of the rules of all packages."""
    root = tmp_path_factory.mktemp("bazel")
    query = ["query", 'kind("cc_.* rule", //...)', "--output=xml"]
    xml = _run("bazel", f"--output_user_root={root}", "--batch", *query)
    targets: Targets = {}
    for rule in ElementTree.fromstring(xml).iter("rule"):
        labels = {label.attrib["value"] for label in rule.findall("list[@name='srcs']/label")}
        paths = {label.removeprefix("//").replace(":", "/") for label in labels}
        if ours := frozenset(path for path in paths if path.endswith(".cc")):
            targets[rule.attrib["name"]] = ours
    return targets


def test_each_target_of_one_build_is_a_target_of_the_other(
    cmake_targets: Targets, bazel_targets: Targets
):
    assert len(cmake_targets) >= 8, f"CMake reports too little: {cmake_targets}"
    sources = {"CMake": set(cmake_targets.values()), "Bazel": set(bazel_targets.values())}
    for name, targets in (("CMake", cmake_targets), ("Bazel", bazel_targets)):
        (other,) = sources.keys() - {name}
        alone = {target: sorted(s) for target, s in targets.items() if s not in sources[other]}
        assert not alone, f"{other} has no target of the same files as {name}'s {alone}"


def test_no_file_is_left_out(cmake_targets: Targets):
    compiled = frozenset().union(*cmake_targets.values())
    present = {
        str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.cc")
    }
    # The GPU back end is CMake's alone and off by default.
    left_out = {path for path in present - compiled if "gpu" not in path}
    # Its tests that need no GPU were built with it only, so CI, which has no GPU, ran none of them.
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests/kernels_gpu").glob("*_test.cc")}
    left_out |= {path for path in tests - compiled if not path.endswith("_gpu_test.cc")}
    assert not left_out, f"in no sources.bzl: {sorted(left_out)}"
