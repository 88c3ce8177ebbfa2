"""Checks a built site: links lead somewhere, public names have entries, search finds words.

python docs/_site/check_site.py FOLDER, the folder being what `sphinx-build -b html` has written.
"""

import html.parser
import importlib
import json
import pathlib
import re
import sys
import urllib.parse
import zlib

SEARCHED = {"max_in_flight": "tuning", "heartbeat": "errors", "jax_ep_gpu_sm": "gpu"}  # stems
STABILITY = pathlib.Path(__file__).resolve().parents[1] / "stability.md"


class Page(html.parser.HTMLParser):
    """The links of a page, and the anchors that links may name."""

    def __init__(self, text):
        """Reads the page."""
        super().__init__()
        self.anchors, self.links = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Called for each tag."""
        for name, value in attrs:
            if name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)


def broken_links(site):
    """Lines about links of the site that lead nowhere; and how many links there are."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    count, broken = 0, []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve()
            target = target if parts.path else path
            anchor = urllib.parse.unquote(parts.fragment)
            if not target.exists():
                broken.append(f"{path.relative_to(site)}: {link}: there is no such file")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                broken.append(f"{path.relative_to(site)}: {link}: there is no such anchor")
    return broken, count


def public_names():
    """Every name that stability.md calls public: of jax_ep, and of the modules that it lists."""
    listed = set(re.findall(r"`(jax_ep\.[a-z][\w.]*)`", STABILITY.read_text()))
    modules = {"jax_ep"} | {name for name in listed if "__" not in name and "._" not in name}
    modules |= {"jax_ep.flax.linen", "jax_ep.flax.presets"}  # "with" in its table
    names = modules - {"jax_ep"}
    for module in modules:
        names |= {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    return names


def described_names(site):
    """The names that the site has entries for."""
    data = (site / "objects.inv").read_bytes()
    lines = zlib.decompress(data.split(b"\n", 4)[4]).decode().splitlines()
    return {line.split(" ", 1)[0] for line in lines if re.search(r" py:\w+ ", line)}


def unfound_words(site):
    """Lines about words that the search does not find on the page that has them."""
    text = (site / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    for word, page in SEARCHED.items():
        found = index["terms"].get(word, [])
        found = [found] if isinstance(found, int) else found
        if page not in {index["docnames"][number] for number in found}:
            yield f"the search for {word} does not find {page}"


def main():
    """Prints what is wrong; exits with 1 if anything is."""
    site = pathlib.Path(sys.argv[1]).resolve()
    wrong, count = broken_links(site)
    names = public_names()
    wrong += [
        f"{name}: public, but not in docs/api" for name in sorted(names - described_names(site))
    ]
    wrong += unfound_words(site)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{count} links inside the site, {len(names)} public names, {len(wrong)} wrong")
    sys.exit(1 if wrong or not count else 0)


if __name__ == "__main__":
    main()
