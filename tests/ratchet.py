"""The length ratchet: no Python file over 600 lines, no function over 80; the lists of exceptions only shrink."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FILE_LIMIT, FUNCTION_LIMIT = 600, 80
ROOTS = ("libs", "services", "bench", "examples", "tests")


def too_long(path: Path) -> list[str]:
    """One line per file or function beyond the limits."""
    text = path.read_text()
    found = []
    lines = text.count("\n")
    if lines > FILE_LIMIT:
        found.append(f"{path}: {lines} lines, at most {FILE_LIMIT}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LIMIT:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LIMIT}")
    return found


def main() -> int:
    root = Path(__file__).parent.parent
    found = [line for r in ROOTS for path in sorted((root / r).rglob("*.py")) for line in too_long(path)]
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
