"""Links of the pages to other files of the repository, as the site needs them.

The pages are written for GitHub. Four documents outside of docs/ are pages of the site: what stands
in docs/NAME.md is replaced by their text. A link to another file downloads it, and one to a folder
becomes its text.
"""

import os
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDED = {
    "benchmarks": "benchmarks/README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "security": "SECURITY.md",
}
PAGES = {path: f"docs/{name}.md" for name, path in INCLUDED.items()} | {
    "README.md": "docs/index.md"
}
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def rewrite(text, folder, site_folder):
    """`text` of a page in `folder`, both relative to ROOT, with links as in `site_folder`."""

    def replace(match):
        bang, label, target, anchor = match.group(1, 2, 3, 4)
        if re.match(r"\w+:", target):
            return match[0]
        path = os.path.normpath(os.path.join(folder, target))
        path = PAGES.get(path, path)
        if (ROOT / path).is_dir():
            return label
        anchor = anchor if path.endswith(".md") and anchor else ""
        return f"{bang}[{label}]({os.path.relpath(path, site_folder)}{anchor})"

    parts = FENCED.split(text)  # text, code, text, ...
    parts[::2] = [LINK.sub(replace, part) for part in parts[::2]]
    return "".join(parts)


def read_source(app, docname, content):
    """Sphinx's event source-read."""
    page = f"docs/{docname}.md"
    if docname in INCLUDED:
        page = INCLUDED[docname]
        app.env.note_dependency(str(ROOT / page))
        content[0] = (ROOT / page).read_text()
    site_folder = os.path.dirname(f"docs/{docname}")
    content[0] = rewrite(content[0], os.path.dirname(page), site_folder)


def setup(app):
    """Sphinx calls it."""
    app.connect("source-read", read_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
