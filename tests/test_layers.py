"""Who may include whom: docs/architecture.md "Layers", checked against the sources."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# folder -> prefixes of our own headers that its C++ files may include
ALLOWED_INCLUDES = {
    "proxy/abi": ("proxy/abi/",),
    "proxy/base": ("proxy/base/",),
    "proxy/transport": ("proxy/transport.h", "proxy/transport/", "proxy/base/", "proxy/abi/"),
    "proxy": (
        "proxy/abi/",
        "proxy/base/",
        "proxy/transport.h",
        "proxy/transport/registry.h",
        r"proxy/[a-z_]+\.h$",
    ),
    "kernels/cpu": (
        "kernels/launch.h",
        "kernels/layout.h",
        "kernels/cpu/",
        "proxy/abi/",
        "proxy/base/",
    ),
    "kernels/gpu": (
        "kernels/launch.h",
        "kernels/layout.h",
        "kernels/gpu/",
        "proxy/abi/",
        "proxy/base/",
    ),
    # What all operations stand on; device and memory know nothing of the protocol.
    "kernels/gpu/device": ("kernels/layout.h", "kernels/gpu/device/"),
    "kernels/gpu/memory": ("kernels/gpu/memory/", "kernels/gpu/device/"),
    "kernels/gpu/protocol": (
        "kernels/layout.h",
        r"kernels/gpu/(api|launch|launch_state)\.h$",
        "kernels/gpu/device/",
        "kernels/gpu/protocol/",
    ),
    "kernels/gpu/sums": ("kernels/layout.h", "kernels/gpu/device/", "kernels/gpu/protocol/", "kernels/gpu/sums/"),
    # The plan is made once for both modes; the rest of a mode is its own.
    "kernels/gpu/ht": (
        "kernels/launch.h",
        r"kernels/gpu/[a-z_]+\.h$",
        r"kernels/gpu/(device|protocol|sums|network|ht)/",
    ),
    "kernels/gpu/ll": (
        "kernels/launch.h",
        r"kernels/gpu/[a-z_]+\.h$",
        r"kernels/gpu/(device|protocol|sums|network|lanes|ll|ht/plan)/",
    ),
    "kernels": ("kernels/launch.h", "kernels/layout.h", "proxy/abi/", "proxy/base/"),
    "xla_ffi": (
        "xla_ffi/",
        "kernels/launch.h",
        "kernels/layout.h",
        "kernels/gpu/api.h",
        "kernels/gpu/memory/device_memory.h",
        "proxy/abi/",
        "proxy/base/",
        "proxy/transport/registry.h",
        r"proxy/[a-z_]+\.h$",
    ),
}
OUR_FOLDERS = ("proxy/", "kernels/", "xla_ffi/", "tests/")
# Headers of others that only one folder may see.
ONLY_IN = {"xla/ffi": "xla_ffi", "nanobind": "xla_ffi", "cuda": "kernels", "hip/": "kernels"}

FORBIDDEN_IMPORTS = ("ctypes", "jax._src")
GUARDED_IMPORTS = ("flax", "pyverbs", "matplotlib", "rich", "optax", "orbax")
# Packages inside jax_ep that only users import, and what each may import at module level.
ADD_ONS = {"flax": ("flax",), "pallas": ()}
PRIVATE_FOR_ADD_ONS = ("_config", "_jax_compat")


def _cpp_files():
    return [
        path
        for folder in ("proxy", "kernels", "xla_ffi")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".h", ".cc", ".cu", ".cuh")
    ]


def _folder(path):
    relative = path.relative_to(ROOT).parent.as_posix()
    while relative not in ALLOWED_INCLUDES:
        relative = relative.rpartition("/")[0]
    return relative


@pytest.mark.parametrize("path", _cpp_files(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_cpp_includes_obey_the_layers(path):
    folder = _folder(path)
    for line in path.read_text().splitlines():
        match = re.match(r'\s*#\s*include\s+[<"]([^>"]+)[>"]', line)
        if not match:
            continue
        header = match.group(1)
        if header.startswith(OUR_FOLDERS):
            assert any(re.match(prefix, header) for prefix in ALLOWED_INCLUDES[folder]), (
                f"{path.name} in {folder} includes {header}"
            )
        for prefix, owner in ONLY_IN.items():
            if header.startswith(prefix):
                assert folder.startswith(owner), f"{path.name} in {folder} includes {header}"


def _imports(path):
    for line in path.read_text().splitlines():
        if match := re.match(r"\s*(?:from|import)\s+([\w.]+)(?:\s+import\s+(\w+))?", line):
            yield line, match.group(1), match.group(2)


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "jax_ep").rglob("*.py")),
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_python_imports_obey_the_layers(path):
    for line, module, _name in _imports(path):
        if module.startswith(FORBIDDEN_IMPORTS):
            allowed = path.name == "_jax_compat.py" and module.startswith("jax._src")
            assert allowed, f"{path.name}: {line.strip()}"
        allowed = ADD_ONS.get(path.relative_to(ROOT / "jax_ep").parts[0], ())
        root = module.split(".")[0]
        if root in GUARDED_IMPORTS and root not in allowed:
            assert line.startswith((" ", "\t")), (
                f"{path.name}: {line.strip()} is imported at module level; import it where it is "
                "used"
            )


def test_import_jax_ep_imports_no_add_on():
    modules = "import sys, jax_ep; print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", modules],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "jax_ep" in loaded
    for name in (*(f"jax_ep.{add_on}" for add_on in ADD_ONS), *GUARDED_IMPORTS):
        assert name not in loaded


@pytest.mark.parametrize(
    "path",
    sorted(p for name in ADD_ONS for p in (ROOT / "jax_ep" / name).rglob("*.py")),
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_add_ons_stand_on_the_public_api(path):
    own = path.relative_to(ROOT / "jax_ep").parts[0]
    for line, module, name in _imports(path):
        full = f"{module}.{name}" if module == "jax_ep" and name else module
        private = re.match(r"jax_ep\.(_\w+)", full)
        if private:
            assert private.group(1) in PRIVATE_FOR_ADD_ONS, f"{path.name} in {own}: {line.strip()}"


@pytest.mark.parametrize(
    "path",
    sorted([*(ROOT / "examples").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]),
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_examples_and_benchmarks_use_the_public_api_only(path):
    for line, module, name in _imports(path):
        private = re.match(r"jax_ep\._|jax\._src", module) or (
            module == "jax_ep" and (name or "").startswith("_")
        )
        assert not private, f"{path.name}: {line.strip()}"


def test_the_table_covers_every_folder_with_cpp_sources():
    folders = {p.relative_to(ROOT).parent.as_posix() for p in _cpp_files()}
    assert folders, "no C++ sources found"
    for folder in folders:
        assert any(folder.startswith(known) for known in ALLOWED_INCLUDES), folder
