"""A repository with what we need of a Python installation.

@py//:nanobind and @py//:xla_ffi: nanobind's sources and jaxlib's headers as libraries.
@py//:python: a script that runs the interpreter, for tests.
"""

_ASK = """
import importlib.util, os, sysconfig
def package(name):
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise SystemExit("no package " + name)
    return os.path.dirname(spec.origin)
print(sysconfig.get_paths()["include"])
print(package("nanobind"))
print(os.path.join(package("jaxlib"), "include"))
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(["include/**/*.h"]),
    includes = ["include"],
)

# The flags that nanobind's own CMake gives an extension module.
cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/nanobind/**/*.h"]),
    copts = ["-fno-strict-aliasing", "-fvisibility=hidden"],
    includes = [
        "nanobind/ext/robin_map/include",
        "nanobind/include",
    ],
    textual_hdrs = glob([
        "nanobind/src/*.h",
        "nanobind/src/*.cpp",
        "nanobind/ext/robin_map/include/tsl/*.h",
    ]),
    linkstatic = True,
    deps = [":headers"],
)

cc_library(
    name = "xla_ffi",
    hdrs = glob(["jaxlib/xla/**/*.h"]),
    includes = ["jaxlib"],
)

exports_files(["python.sh"])
"""

def _python_config_impl(ctx):
    python = ctx.os.environ.get("PYTHON_BIN_PATH") or ctx.which("python3")
    if not python:
        fail("no python3 on PATH, and PYTHON_BIN_PATH is not set")
    asked = ctx.execute([python, "-c", _ASK])
    if asked.return_code:
        fail("{}: {}".format(python, asked.stderr.strip()))
    include, nanobind, jaxlib = asked.stdout.strip().split("\n")
    ctx.symlink(include, "include")
    ctx.symlink(nanobind, "nanobind")
    ctx.symlink(jaxlib, "jaxlib")

    # A script, because a link to a virtual environment's python does not find its packages.
    ctx.file("python.sh", '#!/bin/sh\nexec "{}" "$@"\n'.format(python), executable = True)
    ctx.file("BUILD.bazel", _BUILD)

python_config = repository_rule(
    implementation = _python_config_impl,
    environ = ["PATH", "PYTHON_BIN_PATH"],  # asked again when one of them changes
    local = True,
)
