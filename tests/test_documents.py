"""Documents: links lead somewhere, numbers stand in benchmarks/results, files there have names."""

import bisect
import functools
import json
import math
import os
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks/README.md"]
PAGES += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
# A document may use another unit than a file: ms for us, GB for bytes, percent for shares.
UNITS = (1.0, 1e-3, 1e3, 1e-6, 1e-9, 100.0)
NOT_MEASURED = {"1.17"}  # libfabric's version


def _anchors(page):
    """Names of the page's headings as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = pathlib.Path(os.path.normpath(page.parent / path)) if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def _numbers(value):
    """Every number of a results file, also those in texts and names."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(name)
            yield from _numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, str):
        yield from map(float, re.findall(r"\d+(?:\.\d+)?", value.replace(",", "")))
    elif isinstance(value, int | float):
        yield float(value)


@functools.cache
def _measured():
    """Every number of benchmarks/results, in each unit, ascending."""
    files = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    numbers = {n for file in files for n in _numbers(file) if math.isfinite(n)}
    return sorted(n * unit for n in numbers for unit in UNITS)


def _is_measured(wanted, places):
    """Whether some measured number, rounded to so many decimals, is `wanted`."""
    furthest = 0.51 * 10.0**-places  # of what is rounded to it
    measured = _measured()
    first = bisect.bisect_left(measured, wanted - furthest)
    last = bisect.bisect_right(measured, wanted + furthest)
    return any(abs(round(number, places) - wanted) < 1e-9 for number in measured[first:last])


@pytest.mark.parametrize("page", ["performance.md", "performance_cpu.md", "scale.md"])
def test_numbers_of_the_pages_on_performance_stand_in_results(page):
    text = (ROOT / "docs" / page).read_text()
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|\b(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7}\b", "", text)
    # Whole numbers below 1,000 are left out: nearly each of them stands in some file by chance.
    for figure in set(re.findall(r"\d{1,3}(?:,\d{3})+|\d+\.\d+", prose)) - NOT_MEASURED:
        digits = len(figure.partition(".")[2])
        wanted = float(figure.replace(",", ""))
        # A bound in microseconds may be rounded to hundreds.
        places = (digits, -2) if wanted >= 10_000 else (digits,)
        is_measured = any(_is_measured(wanted, places_of) for places_of in places)
        assert is_measured, f"{figure} stands in no file of benchmarks/results"


@pytest.mark.parametrize("path", sorted(RESULTS.iterdir()), ids=lambda path: path.name)
def test_result_files_say_what_they_are(path):
    assert re.fullmatch(r"[a-z]+(_[a-z]+)?_(cpu|\d+x[a-z0-9]+)\.(json|png)", path.name)
    benchmark = path.stem.rpartition("_")[0]
    assert f"`{benchmark}_" in (ROOT / "benchmarks" / "README.md").read_text()
    if path.suffix == ".png":
        assert path.with_suffix(".json").exists()
        return
    report = json.loads(path.read_text())
    assert report["machine"] and report["date"]
    assert "commit" in report or benchmark == "experiments"
