"""`docs/log-rules.md` names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_table_of_rules_names_tests_that_are_there() -> None:
    text = (ROOT / "docs/log-rules.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 40 and text.count("::") == len(named)
    missing = [(f, t) for f, t in named if not re.search(rf"def {t}\(", (ROOT / f).read_text())]
    assert not missing
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")][1:]
    assert all(len(row) == 3 and "::" in row[1] and row[2].strip() for row in rows)
