"""Runs a command and draws what it printed as a terminal: an SVG for a document.

    python benchmarks/record_terminal.py docs/images/training.svg -- \
        python -m jax_ep launch -n 4 examples/train_moe_lm.py

The lines are the command's own, standard output and standard error as they come; only the middle of
a long output is left out, and the picture says how many lines. The folder of the checkout, where
the command runs, is drawn as ~/jax_ep. A command that fails draws nothing.
"""

import argparse
import pathlib
import re
import shlex
import subprocess
import sys

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COLUMNS = 108  # more than 7 pixels each where the picture is 800 wide
DARK = TerminalTheme(
    (13, 17, 23),
    (230, 237, 243),
    [
        (72, 79, 88),
        (255, 123, 114),
        (63, 185, 80),
        (210, 153, 34),
        (88, 166, 255),
        (188, 140, 255),
        (57, 197, 207),
        (177, 186, 196),
    ],
)
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def shortened(lines, first, last):
    """The first and last lines, and a line between them that counts the others."""
    missing = len(lines) - first - last
    if missing <= 1:
        return lines
    return [*lines[:first], f"      ... {missing} more lines ...", *lines[len(lines) - last :]]


def draw(command, lines):
    """The SVG: the command behind a prompt, then its lines."""
    # Only the recording is wanted, so that what the command printed is not printed again.
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text.assemble(("$ ", "bold green"), (shlex.join(command), "bold")))
        for line in lines:
            console.print(Text.from_ansi(line), highlight=False)
        console.print()  # else the picture's end cuts off the last line's feet
        svg = console.export_svg(title="", theme=DARK, unique_id="terminal")
    # Without the fonts that rich takes from a server: a picture in a page may load nothing.
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: ?Fira Code, ?monospace", f"font-family: {FONT}", svg)
    svg = re.sub(r"\s*<!--.*?-->", "", svg, flags=re.DOTALL)
    words = " ".join([shlex.join(command), "prints:", *lines[-1:]])
    label = words.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=14, help="lines kept from the start")
    parser.add_argument("--last", type=int, default=14, help="lines kept from the end")
    parser.add_argument("--from", dest="log", type=pathlib.Path, help="a log of the same command")
    parser.add_argument("--log", dest="save", type=pathlib.Path, help="keep the whole output here")
    parser.add_argument("svg", type=pathlib.Path)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    if args.log:
        text = args.log.read_text()
    else:
        done = subprocess.run(
            args.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        text = done.stdout
        if done.returncode != 0:
            sys.exit(f"{text}\n{shlex.join(args.command)}: exit code {done.returncode}")
    if args.save:
        args.save.write_text(text)
    lines = text.replace(str(pathlib.Path.cwd()), "~/jax_ep").splitlines()
    args.svg.write_text(draw(args.command, shortened(lines, args.first, args.last)))


if __name__ == "__main__":
    main()
