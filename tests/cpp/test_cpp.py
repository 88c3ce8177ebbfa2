"""Builds the C++ tests and runs them all: the same ctest that a developer runs by hand."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cpp-tests"


def _missing() -> str:
    if shutil.which("cmake") is None:
        return "cmake is not installed (pip install '.[test]' brings it)"
    if not any(
        pathlib.Path(p, "gtest/gtest.h").exists() for p in ("/usr/include", "/usr/local/include")
    ):
        return "GoogleTest is not installed (Debian: apt-get install libgtest-dev)"
    if not (ROOT / "CMakeLists.txt").exists():
        return "the C++ sources are not here (an installed copy of the tests?)"
    return ""


def _skipped(report):
    """(ctest's name, reason) of what GTEST_SKIP left out, which ctest counts as passed."""
    found = {
        (case.get("name"), reason)
        for case in ElementTree.parse(report).iter("testcase")
        for reason in re.findall(r": Skipped\n(.+)", case.findtext("system-out") or "")
    }
    return sorted(found)


@pytest.mark.ci  # the build is most of the time, as long as a third of all other tests
@pytest.mark.timeout(1200)
def test_all_cpp_tests_pass(record_property, tmp_path):
    if reason := _missing():
        pytest.skip(reason)
    configure = ["cmake", "-S", ROOT, "-B", BUILD, "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DJAX_EP_BUILD_TESTS=ON", "-DJAX_EP_BUILD_PYTHON=OFF"]
    # The package's own build compiles the GPU library; its tests need GPUs (docs/gpu.md).
    configure += ["-DJAX_EP_GPU=none"]
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    cores = len(os.sched_getaffinity(0))
    report = tmp_path / "ctest.xml"
    for command in (
        configure,
        ["cmake", "--build", BUILD, "-j", cores],
        [
            "ctest",
            "--test-dir",
            BUILD,
            "-j",
            cores + 1,  # many tests wait
            "--output-on-failure",
            "--timeout",
            "300",
            "--output-junit",
            report,
            "--test-output-size-passed",
            "1000000",
        ],
    ):
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        print(done.stdout[-4000:], file=sys.stderr)
        assert done.returncode == 0, (
            f"{command[:2]} failed:\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
        )
    assert "100% tests passed" in done.stdout
    for name, reason in _skipped(report):
        record_property("skipped in C++", f"{name}: {reason}")
