"""The documentation site: Sphinx, furo and MyST. docs/development.md says how it is built."""

import os
import pathlib
import re
import sys

from sphinx.pycode import ModuleAnalyzer

# The examples in docstrings run on four devices of the CPU. JAX reads these when it is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["NPROC"] = "32"  # threads of XLA's pool
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_site"))

project = "jax_ep"
author = "The jax_ep authors"
project_copyright = author
version = release = re.search(
    r'^__version__ = "(.+)"', (HERE.parent / "jax_ep/_version.py").read_text(), re.MULTILINE
)[1]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "rank_doctest",  # sphinx.ext.doctest, for examples that run inside shard_map
    "repository_links",
]
exclude_patterns = ["_build", "_site"]

# Pages are read on GitHub, too: headings get GitHub's anchors.
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may go from # to ###

highlight_language = "none"  # of blocks that name no language: what is typed or printed

# In a docstring a single backtick is code; it becomes a link where it names something public.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_preprocess_types = False
nitpick_ignore_regex = [
    ("py:obj", "(?s).*"),
    # Types of others, and aliases of ours that signatures spell out.
    ("py:(class|data|exc)", r"(jax|jnp|np|numpy|flax|nnx|nn|optax|jaxlib|typing|collections)\..*"),
    ("py:class", r"(Any|Array|ndarray|dtype|int32|Callable|Literal|NotGiven|Unpack|Mesh)"),
    ("py:class", r"jax_ep\._.*"),  # private ones
]

doctest_global_setup = """
import jax
import jax.numpy as jnp
import numpy as np
import rank_doctest
import jax_ep
"""

html_theme = "furo"
html_title = f"jax_ep {release}"
html_static_path = ["_static"]
html_css_files = ["jax_ep.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app):
    """Sphinx calls it."""

    def keep_colons(app, what, name, obj, options, lines):
        # Napoleon takes what stands before a colon in the first line for a type.
        if what in ("attribute", "data", "property"):
            lines.insert(0, "\\ ")

    def name_values(app, what, name, obj, options, signature, returns):
        # Defaults that are no literals, by the names under which one writes them.
        if signature:
            signature = re.sub(r"<class '([\w.]+)'>", r"\1", signature)
            signature = re.sub(r"<PjitFunction of <function (\w+)[^>]*>>", r"jax.nn.\1", signature)
            signature = re.sub(
                r"jax\.jaxlib\._jax\.Array|jaxlib\._jax\.Array", "jax.Array", signature
            )
        return signature, returns

    def without_overloads(analyzer):
        # An operation with overloads, which are for type checkers, has one signature here.
        analyze(analyzer)
        analyzer.overloads = {}

    analyze, ModuleAnalyzer.analyze = ModuleAnalyzer.analyze, without_overloads
    app.connect("autodoc-process-signature", name_values)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon
