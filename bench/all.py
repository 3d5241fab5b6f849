"""All benchmarks in their short form: `python -m bench.all --short` refreshes the measured lines of `docs/numbers.md`.

Each benchmark is a process of its own and prints one JSON object a line; a benchmark that fails is told and left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

NAMES = (
    "proxy",
    "memory",
    "exact",
    "log",
    "reconstruct",
    "staging",
    "fidelity",
    "analytics",
    "stream",
    "ablation",
    "chaos",
)
NUMBERS = Path(__file__).parent.parent / "docs/numbers.md"
MARK = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.DOTALL)


def run(name: str, short: bool) -> list[dict[str, object]]:
    """The benchmark's lines; empty if it failed."""
    argv = [sys.executable, "-m", f"bench.{name}", "--json", *(["--short"] if short else [])]
    print(f"{' '.join(argv[1:])} …", flush=True)
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"bench.{name} failed with {done.returncode}", file=sys.stderr)
        return []
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def row(bench: str, line: dict[str, object]) -> str:
    cells = [f"{bench}.{line['name']}", line["value"], line.get("unit", ""), line.get("baseline"), line.get("ratio")]
    return "| " + " | ".join("" if c is None else f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("names", nargs="*", default=list(NAMES))
    options = parser.parse_args()
    rows = [row(name, line) for name in options.names for line in run(name, options.short)]
    head = f"{datetime.now(UTC):%Y-%m-%d}, `python -m bench.all{' --short' if options.short else ''}`, "
    head += f"{platform.machine()}, Python {platform.python_version()}\n\n"
    table = "| name | value | unit | baseline | ratio |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
    text = NUMBERS.read_text()
    NUMBERS.write_text(MARK.sub(lambda m: m.group(1) + head + table + m.group(2), text))
    print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
