"""What `simulate.py ask` takes: sizes of a group, and a network."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from simulator import projections

MOST_RANKS = 4096  # rows are counted in arrays [ranks, ranks]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=_count(1), required=True)
    parser.add_argument("--node-size", type=_count(1), default=8)
    parser.add_argument("--tokens", type=_count(1), default=4096, help="of a rank, in mode ht")
    parser.add_argument("--hidden", type=_count(1), default=7168, help="elements of 2 bytes")
    parser.add_argument("--top-k", type=_count(1), default=8)
    parser.add_argument(
        "--zipf", type=_not_negative, default=0.0, help="exponent of the experts' popularity"
    )
    parser.add_argument(
        "--gb-s", type=_positive, required=True, help="of one rank's NICs, each way"
    )
    parser.add_argument("--latency-us", type=_not_negative, required=True)
    parser.add_argument(
        "--post-us", type=_not_negative, required=True, help="of one message and thread"
    )
    parser.add_argument("--gpu-direct", action="store_true", help="no pinned stage")
    parser.add_argument("--rows-per-message", type=_count(0), default=0, help="0: as it is today")
    parser.add_argument("--pieces", type=_count(1), default=8)
    parser.add_argument("--proxy-threads", type=_count(1), default=1)
    parser.add_argument("--late-us", type=_not_negative, default=0.0, help="how late a rank may be")


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program with a message unless the numbers are those of a group."""
    if args.ranks > MOST_RANKS:
        parser.error(f"argument --ranks: got {args.ranks}, expected at most {MOST_RANKS}")
    if args.ranks % args.node_size:
        parser.error(
            f"argument --ranks: got {args.ranks}, expected a multiple of "
            f"--node-size={args.node_size}"
        )
    experts = projections.num_experts(args.ranks)
    if args.top_k > experts:
        parser.error(f"argument --top-k: got {args.top_k}, expected at most the {experts} experts")


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of at least {least}")
        return int(text)

    return parse


def _number(text: str, expected: str) -> float:
    """A finite number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
    return value


def _not_negative(text: str) -> float:
    return _number(text, "a finite number of at least 0")


def _positive(text: str) -> float:
    expected = "a finite number above 0"
    value = _number(text, expected)
    if value == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
    return value
