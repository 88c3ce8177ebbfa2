"""Whether this session is for GPUs: `-m gpu`, or an expression like "gpu and not multiprocess"."""

from __future__ import annotations

import itertools
import sys

ON_GPU = any(
    flag == "-m" and "gpu" in value.split() and "not gpu" not in value
    for flag, value in itertools.pairwise(sys.argv)
)
