"""The examples' modules can be imported as their scripts import them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
