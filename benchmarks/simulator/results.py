"""Reads what was measured: benchmarks/results/NAME.json."""

from __future__ import annotations

import json
import pathlib
from typing import Any

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
