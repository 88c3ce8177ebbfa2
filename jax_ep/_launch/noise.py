"""Lines that XLA and Gloo write in every job, whatever happens, and that say nothing to a user.

Only whole, known lines are named, none of them an error. JAX_EP_LOG=debug shows them.
"""

from __future__ import annotations

import re

_HARMLESS = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to (?P<found>\d+) peer ranks\. "
    rb"Expected number of connected peer ranks is : (?P=found)\s*"
    rb"|[IW]\d{4} \S+ +\d+ coordination_service\.cc:\d+\] (\[\d+\] )?"
    rb"Using experimental recoverable task feature\. The default shutdown barrier will only block "
    rb"non-recoverable tasks\. If a synchronized shutdown is desired, the user / library should "
    rb"invoke `WaitAtBarrier` explicitly at the end of the program\.\s*"
    rb"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR\s*"
)


def is_harmless(line: bytes) -> bool:
    """Whether a line of a process's output can be left out."""
    return _HARMLESS.fullmatch(line) is not None
