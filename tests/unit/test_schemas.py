"""`schemas/` is what the code says now: run `make schemas` after a change of events, task fields, tables or routes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2] / "schemas"


def test_the_committed_schemas_dont_drift_from_the_code() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, bytes] = module.files()
    there = {str(p.relative_to(ROOT)): p.read_bytes() for p in ROOT.rglob("*") if p.suffix in (".json", ".sql")}
    assert sorted(there) == sorted(made)
    assert not [name for name, content in made.items() if there[name] != content]
