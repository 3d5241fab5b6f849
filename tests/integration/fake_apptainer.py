#!/usr/bin/env python3
"""Stands in for `apptainer exec`: records each command line, then does with bubblewrap what Apptainer would do.

The image is a directory. The record is `calls.jsonl`, beside the link by which this file is called.
"""

import json
import os
import sys
from pathlib import Path

FLAGS = {"--quiet", "--containall", "--no-eval", "--no-privs", "--writable-tmpfs", "--pid", "--ipc", "--uts", "--net"}


def main(args: list[str]) -> None:
    with (Path(sys.argv[0]).parent / "calls.jsonl").open("a") as log:
        log.write(json.dumps({"argv": args, "env": sorted(os.environ)}) + "\n")
    line = ["bwrap", "--unshare-all", "--die-with-parent", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
    line += ["--tmpfs", "/", "--proc", "/proc", "--dev", "/dev"]
    binds: list[str] = []
    while args and (args[0].startswith("-") or args[0] == "exec"):
        flag = args.pop(0)
        if flag in ("--bind", "--home"):
            source, target, *mode = args.pop(0).split(":")
            binds += ["--ro-bind" if mode == ["ro"] else "--bind", source, target]
        elif flag in ("--network", "--pwd", "--hostname"):
            args.pop(0)
        elif flag not in FLAGS and flag != "exec":
            sys.exit(f"FATAL: unknown flag {flag}")
    image, *command = args
    if not Path(image).is_dir():
        sys.stderr.write(f"FATAL:   could not open image {image}: no such file or directory\n")
        sys.exit(255)
    for entry in sorted(Path(image).iterdir()):
        line += ["--ro-bind", str(entry), f"/{entry.name}"]
    env = {k.removeprefix("APPTAINERENV_"): v for k, v in os.environ.items() if k.startswith("APPTAINERENV_")}
    env["HOME"] = "/home/agent"
    os.execvpe("bwrap", [*line, *binds, *command], {"PATH": os.environ["PATH"], **env})


if __name__ == "__main__":
    main(sys.argv[1:])
