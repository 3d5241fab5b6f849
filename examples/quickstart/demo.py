"""`make demo`: a house on this machine, the quickstart's tasks through it, and a look at what came out.

    python examples/quickstart/demo.py [--data DIR] [--keep]

With `--keep` the house stays up; otherwise it is stopped at the end. Either way everything is in the data directory.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
POLAR = [sys.executable, "-m", "polar_common.cli"]
SQL = """
SELECT harness, outcome, count() AS sessions, round(avg(reward), 3) AS mean_reward, sum(traces) AS traces,
       sum(sampled_tokens) AS tokens
FROM sessions GROUP BY harness, outcome ORDER BY harness, outcome
"""
ONE_TRACE = "SELECT session FROM traces FINAL WHERE build = 'live' ORDER BY spans DESC, session LIMIT 1"


def polar(*arguments: str, data: Path, check: bool = True, quiet: bool = False) -> str:
    """Run a command and show its output; its standard output is returned."""
    argv = [*POLAR, *arguments, "--data", str(data)]
    if quiet:
        return subprocess.run(argv, check=check, stdout=subprocess.PIPE, text=True).stdout
    print(f"\n$ polar {shlex.join(arguments)}", flush=True)
    subprocess.run(argv, check=check)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(".polar"))
    parser.add_argument("--keep", action="store_true", help="leave the house up")
    options = parser.parse_args()
    began = time.monotonic()
    polar("up", "--detach", data=options.data)
    try:
        # A session that couldn't run is in its table, and no reason to hide the others.
        polar("run", str(HERE / "tasks.yaml"), "--run", "quickstart", data=options.data, check=False)
        session = polar("query", ONE_TRACE, "--json", data=options.data, quiet=True)
        if session:
            polar("trace", "show", session.split('"')[3], data=options.data)
        polar("query", " ".join(SQL.split()), data=options.data)
    finally:
        if not options.keep:
            polar("down", data=options.data, check=False)
    print(f"\n{time.monotonic() - began:.0f} s. More:")
    print("  polar up                    start the house again: everything is still there")
    print("  polar status                where its parts are; the dashboard is the one named analytics")
    print("  polar session show ID       one session, attempt by attempt")
    print("  polar replay --build again  the same traces, made anew from the log")
    print(f'  polar query "..."           SQL over {options.data}/chdb')
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
