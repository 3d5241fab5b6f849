"""The ratchet: no Python file over 600 lines, no function over 80, no two test modules of one name."""

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


def same_name(tests: Path) -> list[str]:
    """One line per test module whose name another one has: pytest can't import both."""
    paths: dict[str, list[Path]] = {}
    for path in sorted(tests.rglob("*.py")):
        if path.name not in {"conftest.py", "__init__.py"}:
            paths.setdefault(path.name, []).append(path)
    return [f"{name}: also {there[0]}" for there in paths.values() for name in there[1:]]


def main() -> int:
    root = Path(__file__).parent.parent
    found = [line for r in ROOTS for path in sorted((root / r).rglob("*.py")) for line in too_long(path)]
    found += same_name(root / "tests")
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
