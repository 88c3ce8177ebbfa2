"""Who may include whom: docs/architecture.md "Layers", checked against the sources."""

import ast
import graphlib
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
        "kernels/fp8_rows.h",
        "kernels/launch.h",
        "kernels/layout.h",
        "kernels/cpu/",
        "proxy/abi/",
        "proxy/base/",
    ),
    "kernels/gpu": (
        "kernels/epoch.h",
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
        "kernels/epoch.h",
        "kernels/layout.h",
        r"kernels/gpu/(api|launch|launch_state)\.h$",
        "kernels/gpu/device/",
        "kernels/gpu/protocol/",
    ),
    "kernels/gpu/sums": (
        "kernels/layout.h",
        "kernels/gpu/device/",
        "kernels/gpu/protocol/",
        "kernels/gpu/sums/",
    ),
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
    "kernels": (
        "kernels/epoch.h",
        "kernels/launch.h",
        "kernels/layout.h",
        "kernels/rounds.h",
        "proxy/abi/",
        "proxy/base/",
    ),
    "xla_ffi": (
        "kernels/epoch.h",
        "xla_ffi/",
        "kernels/cpu/huge_pages.h",
        "kernels/fp8_rows.h",
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

FORBIDDEN_IMPORTS = ("ctypes", "jax._src", "jaxlib")
GUARDED_IMPORTS = ("flax", "pyverbs", "matplotlib", "rich", "optax", "orbax")
# Packages inside jax_ep that only users import, and what each may import at module level.
ADD_ONS = {"flax": ("flax",), "pallas": ()}
PRIVATE_FOR_ADD_ONS = ("_config", "_jax_compat")

# The layers of jax_ep, lowest first: what a module may import at all, in functions too. A folder
# may import itself. What is not named here is on top: __init__, moe, routing and the commands.
BASE = (
    "_config",
    "_env",
    "_extension",
    "_fp8_format",
    "_gpu_library",
    "_group",
    "_jax_compat",
    "_log",
    "_memory",
    "_mesh",
    "_placement",
    "_session_number",
    "_stats",
    "_types",
    "_version",
    "_view_config",
    "_warn",
)
PYTHON_LAYERS = {
    **dict.fromkeys(BASE, BASE),
    "_ops": BASE,
    "_runtime": BASE,
    "_create_group": (*BASE, "_ops", "_runtime"),
    "_moe": (*BASE, "_ops", "_overlap"),
    "_overlap": BASE,
    "_rebalance": BASE,
    "_slots": (*BASE, "_ops"),
    "_replicas": (*BASE, "_ops", "_slots"),
    "_launch": BASE,
    "_cli": (*BASE, "_launch", "_runtime", "testing"),
}
BASELINES = "jax_ep._cli.baselines"
LOOP_STEPS = "jax_ep._cli.loop_steps"


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
            allowed = path.name == "_jax_compat.py" and module.startswith("jax")
            assert allowed, f"{path.name}: {line.strip()}"
        allowed = ADD_ONS.get(path.relative_to(ROOT / "jax_ep").parts[0], ())
        root = module.split(".")[0]
        if root in GUARDED_IMPORTS and root not in allowed:
            assert line.startswith((" ", "\t")), (
                f"{path.name}: {line.strip()} is imported at module level; import it where it is "
                "used"
            )


def _python_modules():
    """{name: path} of every module and package of jax_ep."""
    modules = {}
    for path in sorted((ROOT / "jax_ep").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def _imported_modules(name, modules):
    """The modules of jax_ep that `name` imports anywhere, in functions and for types alike.

    A package that only holds what is imported stands for nothing itself: `from jax_ep import _env`
    is about jax_ep._env, `import jax_ep` about jax_ep.
    """
    found = set()
    for node in ast.walk(ast.parse(modules[name].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: relative import in line {node.lineno}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return found & modules.keys() - {name}


def test_no_module_of_jax_ep_imports_itself_through_others():
    modules = _python_modules()
    graph = {name: _imported_modules(name, modules) for name in modules}
    assert graph["jax_ep._create_group"] >= {"jax_ep._group", "jax_ep._runtime.start"}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("layer", PYTHON_LAYERS)
def test_python_layers(layer):
    modules = _python_modules()
    inside = [name for name in modules if f"{name}.".startswith(f"jax_ep.{layer}.")]
    assert inside, f"no module jax_ep.{layer}"
    for name in inside:
        for imported in _imported_modules(name, modules):
            below = imported.partition("jax_ep.")[2].split(".")[0]
            public = layer == "_cli" and imported == "jax_ep"
            assert public or below in (layer, *PYTHON_LAYERS[layer]), f"{name} imports {imported}"


def test_the_table_covers_every_private_module():
    private = {name.split(".")[1] for name in _python_modules() if name.startswith("jax_ep._")}
    assert private - {"__main__"} == PYTHON_LAYERS.keys()


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
        if "benchmarks" in path.parts and module in (BASELINES, LOOP_STEPS):
            continue  # one implementation, with `bench --report`, of what is timed, and how
        private = re.match(r"jax_ep\._|jax\._src", module) or (
            module == "jax_ep" and (name or "").startswith("_")
        )
        assert not private, f"{path.name}: {line.strip()}"


def test_the_table_covers_every_folder_with_cpp_sources():
    folders = {p.relative_to(ROOT).parent.as_posix() for p in _cpp_files()}
    assert folders, "no C++ sources found"
    for folder in folders:
        assert any(folder.startswith(known) for known in ALLOWED_INCLUDES), folder
