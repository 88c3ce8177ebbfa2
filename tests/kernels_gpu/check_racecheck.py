"""Fails if a log of compute-sanitizer's racecheck holds a report that is not known to be false.

    python3 check_racecheck.py LOG

racecheck knows barriers and mbarriers. It does not know that ld.acquire and st.release of a word in
shared memory order what is around them. Each pair below was reported (by compute-sanitizer of CUDA
13.0 on an H200) and is ordered as its reason says; the names need JAX_EP_RACECHECK. Every other
pair, and any report that was not printed, is a failure.
"""

import pathlib
import re
import sys

KNOWN = {
    # The words themselves: accesses by ld.acquire.cta and st.release.cta never race.
    ("LoadAcquireBlock", "StoreReleaseBlock"),
}
SUMMARY = re.compile(
    r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)"
)


def function_of(line):
    """The function that an access is in, without namespace, template and other arguments.

    One that is not inlined is there once per kernel that calls it: "[clone KERNEL] FUNCTION".
    """
    name, depth = "", 0
    for letter in re.sub(r"^\[clone [^]]*\] ", "", line.partition(" access at ")[2]):
        if letter == "(" and depth == 0:
            break
        if letter in "<>":
            depth += 1 if letter == "<" else -1
        elif depth == 0:
            name += letter
    return (name.split() or ["?"])[-1].removeprefix("jax_ep::gpu::")


def reports_of(lines):
    """[(first function, the others)]: a report begins with "Race reported"."""
    reports = []
    for line in lines:
        if "Race reported between" in line:
            reports.append((function_of(line), []))
        elif reports and re.match(r"=+\s+and (Read|Write) access at ", line):
            reports[-1][1].append(function_of(line))
    return reports


def problems_of(text):
    summary = SUMMARY.search(text)
    if summary is None:
        return ["no summary: racecheck did not end"]
    displayed, errors, warnings = map(int, summary.groups())
    reports = reports_of(text.splitlines())
    problems = []
    if not displayed == errors + warnings == len(reports):
        problems.append(f"{errors + warnings} hazards, {displayed} shown, {len(reports)} read")
    for first, others in reports:
        for other in others or ["something that was not read"]:
            if not {(first, other), (other, first)} & KNOWN:
                problems.append(f"{first} races with {other}")
    return problems


if __name__ == "__main__":
    found = problems_of(pathlib.Path(sys.argv[1]).read_text())
    for problem in dict.fromkeys(found):
        print(problem)
    sys.exit(1 if found else 0)
