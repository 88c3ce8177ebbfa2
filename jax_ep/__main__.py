"""``python -m jax_ep COMMAND``: parses, then hands over to one module."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import sys

from jax_ep._config import TRANSPORTS
from jax_ep._launch.launcher import launch
from jax_ep._launch.options import BINDINGS, DEFAULT_GRACE_S, LaunchOptions

_LAUNCH_EPILOG = """\
Everything after the script's or module's name goes to it.  In each process jax.distributed is
already initialised, so a script that also runs elsewhere says
    if not jax.distributed.is_initialized(): jax_ep.initialize()

A failing process leaves the others --grace seconds to report; then they get SIGTERM and, 5 s
later, SIGKILL.  The exit code is that of the first process that failed (128 + signal if one ended
it), 0 if none did.  With --keep-going, for programs that go on without lost processes, process 0
alone decides both; with --restarts R a process that has failed is started again under its number,
for groups that take it back (Group.readmit).  SIGINT, SIGTERM and SIGHUP are passed on; a second
one ends the job at once.

Process 0 hosts JAX's coordination service, and all end with it.  With --coordinator a process of
its own does, so that also process 0 may be lost and started again.  With --keep-going the job then
ends when the first process ends well, or the last one fails.  If the coordinator ends, all do.
A job on several hosts: --coordinator --coordinator-address HOST:PORT --job-processes M on HOST, the
same without --coordinator and with --first-process F on the others, each with its own -n.

SIGUSR1 is passed on to the processes: each with an open group writes who hangs.
Nothing that the job started outlives the launcher, even if the launcher itself is killed.

Lines that XLA and Gloo write in every job are left out; JAX_EP_LOG=debug shows them.

With -D above 1, XLA_FLAGS gets the device count and NPROC (the size of XLA's thread pool) becomes
max(32, 4*D) unless it is set.

example: python -m jax_ep launch -n 4 examples/train_moe_lm.py --steps 50
"""


def _count(text: str) -> int:
    """How many, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_ep", description="Expert-parallel dispatch and combine for JAX."
    )
    parser.add_argument("--version", action="version", version=f"jax_ep {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    info_parser = commands.add_parser("info", help="what is installed here and what it can use")
    info_parser.add_argument("--nics", action="store_true", help="list NICs, GIDs and providers")

    selftest = commands.add_parser("selftest", help="check every path of this machine (< 30 s)")
    selftest.add_argument("--json", metavar="FILE", help="also write the results to FILE")

    bench = commands.add_parser("bench", help="measure dispatch and combine against jax.lax")
    from jax_ep._cli.shapes import SHAPES

    bench.add_argument(
        "--shape", choices=sorted(SHAPES), help="a named shape (default small; --report: several)"
    )
    bench.add_argument("--mode", default="auto", choices=("auto", "ht", "ll"))
    bench.add_argument(
        "--ranks",
        type=_count,
        help="ranks = CPU devices of all processes (default 4; --report: or all GPUs)",
    )
    bench.add_argument(
        "--processes",
        type=_count,
        help="processes that share the ranks (default 1; --report: one per CPU rank)",
    )
    bench.add_argument("--node-size", type=_count, default=None, help="ranks per virtual node")
    bench.add_argument(
        "--transport", default="auto", choices=TRANSPORTS, help="between nodes (default auto)"
    )
    bench.add_argument("--repeats", type=_count, default=20, help="timed runs of each program")
    bench.add_argument(
        "--wire",
        metavar="BUILD",
        help="measure put+signal with the C++ benchmarks of BUILD instead",
    )
    bench.add_argument("--provider", default="tcp", help="--wire: libfabric's provider")
    bench.add_argument("--address", default="127.0.0.1", help="--wire: of the interface to use")
    bench.add_argument("--out", default="bench-results", metavar="DIR", help="for JSON and PNG")
    bench.add_argument(
        "--report",
        metavar="DIR",
        help="measure several cases beside JAX's own exchanges (two minutes on 2 cores); write "
        "DIR/index.html and DIR/results.json",
    )

    asking = commands.add_parser("report", help="who hangs in the jobs that run on this host")
    asking.add_argument("--pid", type=int, help="ask this process only")
    asking.add_argument(
        "--html",
        metavar="DIR",
        help="instead of text, write DIR/index.html: load, imbalance, waits, drops and flows",
    )

    merge = commands.add_parser("trace", help="merge what JAX_EP_TRACE has written, for Perfetto")
    merge.add_argument("prefix", help="what JAX_EP_TRACE was")
    merge.add_argument("--out", metavar="FILE", help="instead of PREFIX.pftrace")

    launcher = commands.add_parser(
        "launch",
        help="start N processes of a script on this host",
        usage="python -m jax_ep launch -n N [options] (script.py | -m module) [arguments]",
        epilog=_LAUNCH_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    launcher.add_argument("-n", type=int, required=True, metavar="N", help="number of processes")
    launcher.add_argument(
        "-D",
        "--devices-per-process",
        type=int,
        default=1,
        metavar="D",
        help="virtual CPU devices of each process (default 1)",
    )
    launcher.add_argument(
        "--gpus-per-process",
        type=int,
        default=0,
        metavar="G",
        help="GPUs of each process, in order (default: JAX's own choice)",
    )
    launcher.add_argument(
        "--hide-other-gpus",
        action="store_true",
        help="each process sees its own GPUs only (CUDA_VISIBLE_DEVICES)",
    )
    launcher.add_argument(
        "--bind-to",
        choices=BINDINGS,
        default="none",
        help="core: each process on its share of the cores, which steadies ll calls where ranks "
        "outnumber cores (default none)",
    )
    launcher.add_argument(
        "--grace",
        type=float,
        default=DEFAULT_GRACE_S,
        metavar="S",
        help=f"seconds that the others run on after a failure (default {DEFAULT_GRACE_S:g})",
    )
    launcher.add_argument(
        "--keep-going",
        action="store_true",
        help="the others run on after a failure, for as long as process 0 does",
    )
    launcher.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="R",
        help="with --keep-going: start a process that has failed again, each up to R times",
    )
    launcher.add_argument(
        "--coordinator",
        action="store_true",
        help="host JAX's coordination service in a process of its own: process 0 may be lost, too",
    )
    launcher.add_argument(
        "--coordinator-address",
        metavar="HOST:PORT",
        help="where the processes of several hosts reach it (default: a free port of 127.0.0.1); "
        "without --coordinator, another launcher hosts it",
    )
    launcher.add_argument(
        "--job-processes",
        type=int,
        default=0,
        metavar="M",
        help="processes of the job on all hosts (default N)",
    )
    launcher.add_argument(
        "--first-process",
        type=int,
        default=0,
        metavar="F",
        help="number of the first process of this host (default 0)",
    )
    launcher.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="module",
        help="instead of a script: a module, as Python's own -m takes it, and its arguments",
    )
    launcher.add_argument("script", nargs=argparse.REMAINDER, help="script.py and its arguments")
    for command in (launcher, selftest):  # errors of what is read later, beside their usage
        command.set_defaults(error=command.error)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("jax_ep")
    except importlib.metadata.PackageNotFoundError:  # a checkout on sys.path
        return "(not installed)"


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "launch":
        if options.script[:1] == ["--"]:
            del options.script[0]
        try:
            launch_options = LaunchOptions(
                num_processes=options.n,
                # argparse takes -mNAME for the module alone, and leaves what follows to the script.
                command=(options.module or []) + options.script,
                is_module=options.module is not None,
                devices_per_process=options.devices_per_process,
                gpus_per_process=options.gpus_per_process,
                hide_other_gpus=options.hide_other_gpus,
                bind_to=options.bind_to,
                grace_s=options.grace,
                keep_going=options.keep_going,
                restarts=options.restarts,
                coordinator=options.coordinator,
                coordinator_address=options.coordinator_address,
                job_processes=options.job_processes,
                first_process=options.first_process,
            )
        except ValueError as error:
            options.error(str(error))
        return launch(launch_options)
    if options.command == "info":
        if options.nics:
            from jax_ep._cli.nics import nics

            return nics()
        from jax_ep._cli.info import info

        return info()
    if options.command == "selftest":
        from jax_ep._cli.selftest import selftest

        if options.json is not None:
            try:
                open(options.json, "a", encoding="utf-8").close()
            except OSError as error:
                options.error(
                    f"--json: got {options.json}, expected a file that can be written "
                    f"({error.strerror})"
                )
        return selftest(options.json)
    if options.command == "report":
        from jax_ep._cli.report import report

        if options.html is not None:
            from jax_ep._cli.report_page import report_page

            return report_page(options.pid, options.html)
        return report(options.pid)
    if options.command == "trace":
        from jax_ep._cli.trace import trace

        return trace(options.prefix, options.out)
    if options.wire:
        from jax_ep._cli.wire import wire

        transport = "ofi" if options.transport == "auto" else options.transport
        return wire(options.wire, transport, options.provider, options.address, options.out)
    from jax_ep._cli.bench import BenchOptions, bench

    is_report = options.report is not None

    def chosen(value: int | None, default: int) -> int:
        return value if value is not None else 0 if is_report else default

    bench_options = BenchOptions(
        shape=options.shape or "small",
        mode=options.mode,
        num_ranks=chosen(options.ranks, 4),
        num_processes=chosen(options.processes, 1),
        node_size=options.node_size,
        transport=options.transport,
        repeats=options.repeats,
        out_dir=options.report if is_report else options.out,
    )
    if is_report:
        from jax_ep._cli.bench_report import bench_report

        return bench_report(bench_options, options.shape)
    return bench(bench_options)


def _in_shell() -> int:
    """`main`, whose output somebody may stop to read, as `head` does."""
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Nor shall Python complain when it flushes once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # what the shell says of programs that SIGPIPE ends


if __name__ == "__main__":
    sys.exit(_in_shell())
