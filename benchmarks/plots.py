"""Plots of the GPU benchmarks' results; each lies beside its JSON (README.md has the names)."""

CUT_OFF = 2.0  # of the shortest bar


OTHERS = {
    "all_gather": ("all_gather, psum_scatter", "tab:blue", "o"),
    "dense": ("all_to_all, padded", "tab:orange", "s"),
    "ragged": ("ragged_all_to_all", "tab:red", "D"),
}


def exchanges(results, path):
    """A row for each case: dispatch + combine of JAX's collectives over that of jax_ep."""
    cases = sorted(
        (case for case in results if "jax_ep" in case["us"]),
        key=lambda case: (case["mode"], case["spec"], case["routing"], case["tokens"]),
    )
    if not cases:
        return

    def pair(case, name):
        return case["us"][name]["dispatch"] + case["us"][name]["combine"]

    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8.5, 1.2 + 0.3 * len(cases)), layout="constrained")
    for name, (label, colour, marker) in OTHERS.items():
        points = [
            (pair(case, name) / pair(case, "jax_ep"), row)
            for row, case in enumerate(cases)
            if name in case["us"]
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=colour, label=label)
    axes.axvline(1, color="tab:green", linewidth=2, label="jax_ep")
    titles = [
        f"{case['mode']}, {case['spec']}, {case['routing']}, {case['tokens']:,}: "
        f"{pair(case, 'jax_ep'):,.0f} us"
        for case in cases
    ]
    axes.set_yticks(range(len(cases)), titles, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    ticks = [0.5, 1, 2, 5, 10, 20, 50, 100, 200]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("dispatch + combine, as a multiple of jax_ep's time (right: jax_ep is faster)")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def peers(report, path):
    """Bars beside other libraries: mode ht by operation with 64 SMs, a decoder's pair by tokens."""
    ht, ll = (
        report["ht_us_by_sms"],
        report["ll_us_by_tokens (dispatch, combine, the pair back to back)"],
    )
    colours = {"jax_ep": "tab:green", "DeepEP V2": "0.45", "NCCL EP": "0.75"}
    groups = {
        "dispatch,\nby expert": (
            "jax_ep plan + dispatch, expert_major, capacity 1.25, zeroed",
            "DeepEP V2 dispatch, expand",
            "NCCL EP 0.2 handle update + dispatch, expert-major",
        ),
        "combine,\nby expert": (
            "jax_ep combine from expert_major, weights inside",
            "NCCL EP 0.2 combine, expert-major",
        ),
        "dispatch,\nby rank": (
            "jax_ep plan + dispatch, rank_major",
            "DeepEP V2 dispatch",
            "NCCL EP 0.1 update + dispatch, flat, zero-copy",
        ),
        "combine,\nby rank": (
            "jax_ep combine, rank_major",
            "DeepEP V2 combine",
            "NCCL EP 0.1 combine, flat",
        ),
    }
    pairs = {
        f"{tokens} token{'s' if tokens != '1' else ''}": {
            name: next(
                (ll[key][tokens][2] for key in ll if key.startswith(start) and tokens in ll[key]),
                None,
            )
            for name, start in (
                ("jax_ep", "jax_ep rank_major"),
                ("DeepEP V2", "DeepEP V2"),
                ("NCCL EP", "NCCL EP 0.2, rank" if tokens == "128" else "NCCL EP 0.1"),
            )
        }
        for tokens in ("1", "8", "32", "128")
    }
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
    of_ht = {
        title: {
            name: next((ht[key]["64"] for key in keys if key.startswith(name)), None)
            for name in colours
        }
        for title, keys in groups.items()
    }
    for axes, bars in ((left, of_ht), (right, pairs)):
        for offset, (name, colour) in enumerate(colours.items()):
            values = [group[name] for group in bars.values()]
            places = [i + 0.27 * (offset - 1) for i, value in enumerate(values) if value]
            drawn = axes.bar(places, [v for v in values if v], 0.25, color=colour, label=name)
            axes.bar_label(drawn, fontsize=7)
        axes.set_xticks(range(len(bars)), list(bars))
        axes.set_ylabel("us")
        axes.legend(fontsize=8)
    left.set_title("training: 4,096 tokens, 64 SMs", fontsize=10)
    right.set_title("decoding: dispatch and combine, back to back, by rank", fontsize=10)
    figure.savefig(path, dpi=110)


def overlap(report, path):
    """A traced step of the layer with a shared expert: what the GPU's streams do, and when."""
    spans = next(iter(report["specs"].values()))["shared"]["spans"]
    plt = pyplot()
    figure, grid = plt.subplots(
        len(spans), 1, figsize=(11, 1.5 * len(spans) + 0.6), sharex=True, layout="constrained"
    )
    lanes = {"rest": (0, "0.65", "products"), "exchange": (1, "tab:green", "exchange")}
    for axes, (variant, events) in zip(grid, spans.items(), strict=True):
        for lane, (place, colour, _) in lanes.items():
            bars = [(at / 1e3, us / 1e3) for name, at, us, _ in events if name == lane]
            axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=colour)
        axes.set_yticks(
            [place for place, _, _ in lanes.values()], [n for _, _, n in lanes.values()]
        )
        axes.set_title(f"Config.overlap={variant == 'overlap'}", loc="left", fontsize=10)
    grid[-1].set_xlabel("ms since the first kernel (jax.profiler)")
    figure.savefig(path, dpi=110)


def layers(results, path):
    """Whole layers: the experts' products below, all other time above; long bars are cut off.

    Each run has a scale of its own: products differ between runs, so compare within a run.
    """
    if not results:
        return
    plt = pyplot()
    ordered = sorted(results, key=lambda result: (result["routing"], result["sms"]))
    widths = [len(result["us"]) for result in ordered]
    figure, panels = plt.subplots(
        ncols=len(results),
        width_ratios=widths,
        squeeze=False,
        figsize=(2 + 1.2 * sum(widths), 4.5),
        layout="constrained",
    )
    for axes, result in zip(panels[0], ordered, strict=True):
        gemms = result["gemms_us"] / 1e3
        top = CUT_OFF * min(result["us"].values()) / 1e3
        for x, us in enumerate(result["us"].values()):
            axes.bar(x, gemms, color="lightgrey")
            axes.bar(x, us / 1e3 - gemms, bottom=gemms, color="tab:red")
            label = f"{us / 1e3:.1f}"
            axes.text(x, min(us / 1e3, top), label, ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(result["us"])), list(result["us"]), fontsize=7)
        axes.set_ylim(0, 1.05 * top)
        sms = result["sms"] or "24 to 64"
        axes.set_title(f"{result['routing']}, {result['tokens']:,} tokens, {sms} SMs", fontsize=9)
    panels[0][0].set_ylabel("value_and_grad, ms")
    figure.suptitle("the experts' products alone (grey) and the rest (red)", fontsize=9)
    figure.savefig(path, dpi=110)


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def skews(results, path):
    """Bars for each workload: the layer without and with EPLB over the balanced one without."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 0.9 + 0.42 * len(results)), layout="constrained")
    for shift, (side, label, colour) in enumerate(
        [("plain", "an expert's rank is fixed", "0.6"), ("eplb", "with EPLB", "tab:green")]
    ):
        rows = [row + 0.38 * shift for row in range(len(results))]
        ratios = [result["layer_over_balanced"][side] for result in results]
        bars = axes.barh(rows, ratios, 0.36, color=colour, label=label)
        axes.bar_label(bars, fmt=" %.2f", fontsize=8)
    axes.margins(x=0.08)
    axes.axvline(1, color="0.3", linewidth=0.8)
    axes.set_yticks(
        [row + 0.19 for row in range(len(results))], [result["workload"] for result in results]
    )
    axes.invert_yaxis()
    axes.set_xlabel("time of the layer, as a multiple of the balanced one without EPLB")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
