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
from simulator import check, memory, projections
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
    asked.add_argument("--ranks", type=int, required=True)
    asked.add_argument("--node-size", type=int, default=8)
    asked.add_argument("--tokens", type=int, default=4096, help="of a rank, in mode ht")
    asked.add_argument("--hidden", type=int, default=7168, help="elements of 2 bytes")
    asked.add_argument("--top-k", type=int, default=8)
    asked.add_argument(
        "--zipf", type=float, default=0.0, help="exponent of the experts' popularity"
    )
    asked.add_argument("--gb-s", type=float, required=True, help="of one rank's NICs, each way")
    asked.add_argument("--latency-us", type=float, required=True)
    asked.add_argument("--post-us", type=float, required=True, help="of one message and thread")
    asked.add_argument("--gpu-direct", action="store_true", help="no pinned stage")
    asked.add_argument("--rows-per-message", type=int, default=0, help="0: as it is today")
    asked.add_argument("--pieces", type=int, default=8)
    asked.add_argument("--proxy-threads", type=int, default=1)
    asked.add_argument("--late-us", type=float, default=0.0, help="how late a rank may be")
    args = parser.parse_args()
    if args.command == "ask":
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
