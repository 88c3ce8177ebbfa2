"""What vendors say of their NICs, and what they do not say and is assumed here."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Network:
    """The network of one host with eight accelerators.

    Attributes:
        gb_s: of one accelerator's NICs together, each way, as the vendor states the line rate.
        rails: NICs of one accelerator.
        efficiency: share of the line rate that messages of 256 KiB and more reach. ASSUMED.
        latency_us: one way, from a proxy's post to the other proxy's event. ASSUMED.
        post_us: a thread posts a write, takes its completion and the arrival. ASSUMED.
        source: of the line rate.
    """

    name: str
    gb_s: float
    rails: int
    latency_us: float
    post_us: float
    source: str
    efficiency: float = 0.9

    @property
    def bytes_per_us(self) -> float:
        """What messages reach."""
        return self.gb_s * self.efficiency * 1e3


# Neither vendor publishes one-way latencies of writes with immediate, nor what a post costs. The
# assumed ones are round numbers: `simulate.py --latency-us` and `--post-us` try others.
NETWORKS = {
    network.name: network
    for network in (
        Network(
            "EFA, p5", 3200 / 8 / 8, 4, 15.0, 0.4, "https://aws.amazon.com/ec2/instance-types/p5/"
        ),
        Network(
            "EFA, p5en", 3200 / 8 / 8, 2, 12.0, 0.4, "https://aws.amazon.com/ec2/instance-types/p5/"
        ),
        Network(
            "EFA, p6-b200",
            3200 / 8 / 8,
            1,
            10.0,
            0.4,
            "https://aws.amazon.com/ec2/instance-types/p6/",
        ),
        Network(
            "ConnectX-7",
            400 / 8,
            1,
            4.0,
            0.2,
            "https://docs.nvidia.com/networking/display/ConnectX7VPI/Introduction",
        ),
        Network(
            "Thor-2",
            400 / 8,
            1,
            5.0,
            0.2,
            "https://www.broadcom.com/products/ethernet-connectivity/network-adapters/bcm57608-400g-ic",
        ),
    )
}
