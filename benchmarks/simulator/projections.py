"""8 to 1,024 ranks on the vendors' NICs: numbers, and the plots of docs/scale.md."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np

from simulator import costs, gpu_check, model, traffic
from simulator.networks import NETWORKS, Network

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
NODE_SIZE, TOKENS, LL_TOKENS, HIDDEN, TOP_K, EXPERTS = 8, 4096, 128, 7168, 8, 256
AT = (64, 256)  # ranks of the comparison of settings; the plot shows the first

# Through pinned memory in runs of neighbours, as GPUs do today; and packed, from device memory.
PATHS: dict[str, dict[str, Any]] = {
    "pinned": {"pinned": True, "rows_per_message": 0},
    "direct": {"pinned": False, "rows_per_message": 64},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "direct, 64 rows a write": {},
    "runs of neighbours": {"rows_per_message": 0},
    "one row a write": {"rows_per_message": 1},
    "one row a write, 4 proxy threads": {"rows_per_message": 1, "proxy_threads": 4},
    "at least 32 pieces": {"pieces": 32},
    "pinned stage": {"pinned": True},
    "pinned stage, runs of neighbours (today)": {"pinned": True, "rows_per_message": 0},
    "a row for each rank, no rails": {"once_per": "rank"},
    "a row for each (token, k), no rails": {"once_per": "pair"},
    "ranks up to 500 us late": {"late_us": 500.0},
}


def num_experts(ranks: int) -> int:
    """The fewest experts from `EXPERTS` on that the ranks can share evenly."""
    return -(-EXPERTS // ranks) * ranks


def case(
    network: Network,
    ranks: int,
    *,
    node_size: int = NODE_SIZE,
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    top_k: int = TOP_K,
    zipf: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """One group: microseconds of all exchanges of the slowest rank."""
    gpu = costs.gpu()
    experts = num_experts(ranks)
    settings = model.Options(row_bytes=2 * hidden, experts=experts, **options)
    ht = traffic.draw(ranks, node_size, tokens, top_k, experts, zipf)
    ll = traffic.draw(ranks, node_size, LL_TOKENS, top_k, experts, zipf)
    numbers = {
        "ht": model.ht(ht, network, gpu, settings),
        "ll": model.ll(ll, network, gpu, settings),
        "all_gather": model.all_gather(ht, network, gpu, settings),
    }
    return {"network": network.name, "ranks": ranks, "tokens": tokens, "zipf": zipf} | {
        name: {key: float(f"{value:.4g}") for key, value in group.items()}
        for name, group in numbers.items()
    }


def project() -> dict[str, Any]:
    """All that docs/scale.md says, with the costs and NICs that it comes from."""
    scaling = [
        case(network, ranks, **options) | {"path": path}
        for path, options in PATHS.items()
        for network in NETWORKS.values()
        for ranks in RANKS
        if ranks > NODE_SIZE
    ]
    connectx = NETWORKS["ConnectX-7"]
    settings = [
        case(connectx, ranks, **(PATHS["direct"] | changed)) | {"setting": name}
        for ranks in AT
        for name, changed in SETTINGS.items()
    ]
    zipf = [case(connectx, AT[0], zipf=value, **PATHS["direct"]) for value in (0.0, 0.5, 1.0)]
    return {
        "shape": {
            "node_size": NODE_SIZE,
            "tokens": TOKENS,
            "ll_tokens": LL_TOKENS,
            "hidden": HIDDEN,
            "top_k": TOP_K,
            "experts": f"{EXPERTS}, or one per rank if that is more; uniform routing, bf16",
        },
        "costs": dataclasses.asdict(costs.gpu()),
        "networks": [dataclasses.asdict(network) for network in NETWORKS.values()],
        "scaling": scaling,
        "settings": settings,
        "zipf": zipf,
        "two GPUs over cuda, [measured, simulated]": gpu_check.compare(),
    }


def draw(report: dict[str, Any], folder: pathlib.Path) -> None:
    """scale_ht.svg, scale_ll.svg and scale_settings.svg."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # The same file for the same numbers.
    matplotlib.rcParams["svg.hashsalt"] = "jax_ep"
    scaling = report["scaling"]
    ranks = [count for count in RANKS if count > NODE_SIZE]

    def line(network: str, path: str, operation: str, key: str) -> list[float]:
        return [
            found[operation][key]
            for count in ranks
            for found in scaling
            if (found["network"], found["path"], found["ranks"]) == (network, path, count)
        ]

    def on_ranks(axes: Any) -> None:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [f"{count:,}" for count in ranks])
        axes.set_xlabel("ranks, 8 in a node")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)

    def save(figure: Any, name: str) -> None:
        figure.savefig(folder / name, metadata={"Date": None, "Creator": None})
        plt.close(figure)

    shown = {"ConnectX-7": "tab:green", "EFA, p5en": "tab:orange"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for network, colour in shown.items():
        for path, style in (("pinned", "--"), ("direct", "-")):
            ms = np.array(line(network, path, "ht", "dispatch_us")) / 1e3
            left.plot(ranks, ms, style, color=colour, label=f"{network}, {path}")
            sent = np.array(line(network, path, "ht", "sent_bytes")) / 1e6
            right.plot(ranks, sent / ms, style, color=colour, label=f"{network}, {path}")
    gather = np.array(line("ConnectX-7", "direct", "all_gather", "gather_us")) / 1e3
    left.plot(ranks, gather, ":", color="tab:blue", label="all_gather, ConnectX-7")
    left.set_yscale("log")
    left.set_ylabel("ms")
    left.set_title("dispatch of 4,096 tokens (ht)", fontsize=10)
    right.axhline(50, color="0.6", linewidth=1)
    right.set_ylim(0, 55)
    right.set_ylabel("GB/s leaving a rank (grey: the line)")
    right.set_title("its use of the network", fontsize=10)
    for axes in (left, right):
        on_ranks(axes)
    save(figure, "scale_ht.svg")

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for network, colour in shown.items():
        for key, style in (("dispatch_us", "-"), ("combine_us", "--")):
            values = line(network, "direct", "ll", key)
            axes.plot(ranks, values, style, color=colour, label=f"{network}, {key[:-3]}")
    plan = line("ConnectX-7", "direct", "ht", "plan_us")
    axes.plot(ranks, plan, ":", color="0.4", label="plan of ht, ConnectX-7")
    axes.set_ylabel("us")
    axes.set_yscale("log")
    axes.set_title("mode ll, 128 tokens", fontsize=10)
    on_ranks(axes)
    save(figure, "scale_ll.svg")

    figure, axes = plt.subplots(figsize=(8.5, 3.6), layout="constrained")
    bars = [bar for bar in report["settings"] if bar["ranks"] == AT[0]]
    for offset, (key, colour) in enumerate((("dispatch", "tab:green"), ("combine", "0.6"))):
        values = [bar["ht"][f"{key}_us"] / 1e3 for bar in bars]
        places = [i + 0.38 * (offset - 0.5) for i in range(len(bars))]
        drawn = axes.barh(places, values, 0.36, color=colour, label=key)
        axes.bar_label(drawn, fmt="%.1f", fontsize=7)
    axes.set_yticks(range(len(bars)), [bar["setting"] for bar in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"ms; {AT[0]} ranks, ConnectX-7, 4,096 tokens")
    axes.legend(fontsize=8)
    save(figure, "scale_settings.svg")
