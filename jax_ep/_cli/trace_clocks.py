"""One clock for the traces of several hosts.

Hosts agree about real time to a millisecond or so; a message takes a hundredth of that. So clocks
are first set by real time, and then by messages, as NTP does it (RFC 5905, section 8): of those
between two hosts the fastest ones each way are taken to have travelled for the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# A message: host and time of its sending, host and time of its arrival; ns of each host's clock.
Message = tuple[str, int, str, int]


def align(
    real_offsets: Mapping[str, int], messages: Iterable[Message], first: str
) -> dict[str, int]:
    """What to add to each host's times, in ns.

    Args:
        real_offsets: by host, real time minus its clock.
        messages: between any hosts; those within one are ignored.
        first: the host that keeps its clock.

    Returns:
        By host; that of `first` is what makes its times begin to count from its own clock: 0.
    """
    offsets = {host: offset - real_offsets[first] for host, offset in real_offsets.items()}
    fastest: dict[tuple[str, str], int] = {}
    for source, sent, target, arrived in messages:
        if source == target:
            continue
        time = arrived + offsets[target] - sent - offsets[source]
        pair = (source, target)
        fastest[pair] = min(fastest.get(pair, time), time)
    known = [first]
    for host in known:  # grows: breadth first, so through as few hosts as possible
        for other in offsets:
            if other in known:
                continue
            there, back = fastest.get((host, other)), fastest.get((other, host))
            if there is None and back is None:
                continue
            if there is not None and back is not None:
                late = (there - back) // 2
            elif there is not None:
                late = min(there, 0)
            else:
                late = -min(back or 0, 0)
            offsets[other] -= late
            for pair in fastest:
                if pair[1] == other:
                    fastest[pair] -= late
                elif pair[0] == other:
                    fastest[pair] += late
            known.append(other)
    return offsets
