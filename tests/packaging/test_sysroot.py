"""Programs linked by .ci/manylinux/make_sysroot want of glibc only what 2.28 has, and work."""

from __future__ import annotations

import pathlib
import platform
import re
import shutil
import subprocess

import pytest

MANYLINUX = pathlib.Path(__file__).resolve().parents[2] / ".ci/manylinux"
NEWEST = (2, 28)

pytestmark = [
    pytest.mark.skipif(not MANYLINUX.exists(), reason="the sdist leaves .ci out"),
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="the published wheels are for x86-64"
    ),
    pytest.mark.skipif(
        not all(map(shutil.which, ("g++", "readelf"))), reason="g++ or binutils is not installed"
    ),
]

# What the libraries use, and what moved between libraries or got new versions since 2.28.
PROGRAM = """
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <sys/stat.h>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <random>
#include <thread>

int main(int count, char** words) {
  struct stat by_path, by_fd;
  if (stat("/", &by_path) != 0 || lstat("/", &by_fd) != 0) return 1;
  if (by_path.st_ino != by_fd.st_ino) return 1;
  FILE* file = fopen(words[0], "r");
  if (fstat(fileno(file), &by_fd) != 0 || by_fd.st_size < 1000) return 2;
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;
  std::unique_lock lock(mutex);
  const auto begin = std::chrono::steady_clock::now();
  if (changed.wait_for(lock, std::chrono::milliseconds(80), [&] { return is_done; })) return 3;
  const auto waited = std::chrono::steady_clock::now() - begin;
  if (waited < std::chrono::milliseconds(80) || waited > std::chrono::seconds(20)) return 4;
  std::jthread other([&] {
    std::scoped_lock other_lock(mutex);
    is_done = true;
    changed.notify_one();
  });
  if (!changed.wait_for(lock, std::chrono::seconds(20), [&] { return is_done; })) return 5;
  if (!std::filesystem::is_directory("/")) return 6;
  std::random_device random;
  if (random() == random() && random() == random()) return 7;
  const double power = pow(count + 1.0, 10.0) + log(count) + exp(count - 1.0);
  printf("%.1f %s\\n", power, dlopen("libm.so.6", RTLD_NOW) ? "opened" : dlerror());
}
"""
WITHOUT_CLOCKWAIT = """
#include <stdio.h>
// As on glibc 2.28: what compat.c asks for is not there.
void* dlsym(void* library, const char* name) {
  printf("asked for %s in %p\\n", name, library);
  return 0;
}
"""


@pytest.fixture(scope="module")
def sysroot(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("sysroot")
    subprocess.run([MANYLINUX / "make_sysroot", folder], check=True)
    return folder


def link(
    sysroot: pathlib.Path, program: pathlib.Path, **sources: str
) -> subprocess.CompletedProcess[str]:
    """Compiles and links {name: C or C++} to `program`."""
    objects = []
    for name, text in sources.items():
        language = "c++" if "<thread>" in text or "int main" in text else "c"
        source = program.with_name(f"{name}.{language.replace('+', 'x')}")
        source.write_text(text)
        objects.append(source.with_suffix(".o"))
        compiler = ["g++", "-std=c++20"] if language == "c++" else ["gcc"]
        command = [*compiler, "-O2", "-x", language, "-c", source, "-o", objects[-1]]
        subprocess.run(command, check=True)
    # A shared library need not look at what others want, such as the libgcc_s of this machine.
    flags = ["-static-libstdc++", "-Wl,--allow-shlib-undefined", f"-L{sysroot}"]
    return subprocess.run(["g++", *flags, *objects, "-o", program], capture_output=True, text=True)


def wanted_versions(program: pathlib.Path) -> set[tuple[int, ...]]:
    text = subprocess.run(
        ["readelf", "--version-info", "--wide", program], check=True, capture_output=True, text=True
    ).stdout
    found = re.findall(r"Name: GLIBC_([\d.]+) ", text)
    return {tuple(map(int, version.split("."))) for version in found}


@pytest.mark.parametrize("newer", ["this glibc's", "2.28's"])
def test_a_program_works(sysroot: pathlib.Path, tmp_path: pathlib.Path, newer: str) -> None:
    program = tmp_path / "program"
    sources = {"main": PROGRAM}
    if newer == "2.28's":
        sources["without_clockwait"] = WITHOUT_CLOCKWAIT
    done = link(sysroot, program, **sources)
    assert done.returncode == 0, done.stderr
    versions = wanted_versions(program)
    assert versions and max(versions) <= NEWEST, versions
    ran = subprocess.run([program], capture_output=True, text=True)
    *asked, last = ran.stdout.splitlines()
    assert (ran.returncode, last) == (0, "1025.0 opened")
    assert ("asked for pthread_cond_clockwait in (nil)" in asked) == (newer == "2.28's")


def test_what_is_newer_is_an_error_of_the_link(
    sysroot: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    newer = "#include <stdlib.h>\nint main() { return arc4random_uniform(1); }\n"
    done = link(sysroot, tmp_path / "program", main=newer)
    assert done.returncode != 0
    assert "undefined reference to `arc4random_uniform'" in done.stderr
