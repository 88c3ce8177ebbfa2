"""Simulates exchanges of many ranks, from costs measured on few (docs/scale.md reads its results).

    python benchmarks/simulate.py check      real runs of 2 to 16 ranks here against the simulator
    python benchmarks/simulate.py project    8 to 1,024 ranks on the vendors' NICs, and the plots
    python benchmarks/simulate.py memory     the memory tables of docs/, from Config.memory
    python benchmarks/simulate.py ask --ranks 512 --gb-s 50 --latency-us 5 --post-us 0.2

`check` writes results/simulator_check_cpu.json, `project` results/simulator_cpu.json and
docs/images/scale_*.svg.
"""

import argparse
import json

from run_cpu import HERE, stamp
from simulator import check, memory, projections, question
from simulator.networks import Network

IMAGES = HERE.parent / "docs" / "images"


def save(name, report):
    record = stamp() | {"program": "benchmarks/simulate.py"} | report
    path = HERE / "results" / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def ask(args):
    network = Network(
        "asked", args.gb_s, 1, args.latency_us, args.post_us, "the command line", efficiency=1.0
    )
    case = projections.case(
        network,
        args.ranks,
        node_size=args.node_size,
        tokens=args.tokens,
        hidden=args.hidden,
        top_k=args.top_k,
        zipf=args.zipf,
        pinned=not args.gpu_direct,
        rows_per_message=args.rows_per_message,
        pieces=args.pieces,
        proxy_threads=args.proxy_threads,
        late_us=args.late_us,
    )
    print(json.dumps(case, indent=1))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    commands.add_parser("project")
    commands.add_parser("memory")
    asked = commands.add_parser("ask")
    question.add_arguments(asked)
    args = parser.parse_args()
    if args.command == "ask":
        question.check(asked, args)
        ask(args)
    elif args.command == "memory":
        report = memory.report()
        memory.write(HERE.parent / "docs", report)
        save("memory_cpu", report)
    elif args.command == "check":
        save("simulator_check_cpu", {"results, [real, simulated]": check.check()})
    else:
        report = projections.project()
        save("simulator_cpu", report)
        projections.draw(report, IMAGES)


if __name__ == "__main__":
    main()
