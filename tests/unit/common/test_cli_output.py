"""What commands print: text from models and harnesses stays text."""

from __future__ import annotations

import pytest
from rich.text import Text

from polar_common.cli.output import console, records, table, warn

HOSTILE = "a\x1b[31mb\x1b]0;title\x07\x9b2Jc\nnext\tline"


def test_no_control_character_reaches_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console.print(HOSTILE, markup=False)
    console.print(Text.assemble((HOSTILE, "bold")))
    table(HOSTILE, [HOSTILE], [[HOSTILE], [3]])
    warn(HOSTILE)
    captured = capsys.readouterr()
    for printed in (captured.out, captured.err):
        assert "␛[31mb␛]0;title" in printed and "next" in printed
        assert not {c for c in printed if (ord(c) < 32 or 127 <= ord(c) < 160) and c not in "\n\t"}


def test_rows_that_dont_fit_are_printed_field_by_field(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width", 100)
    name = "s1-abcdefghijklmnopqrst-0"
    wide = [f"column_{i}" for i in range(40)]
    records(wide, [[name] * 40, [None] * 40])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 82 and lines[1].split() == ["column_0", name] and lines[-1].split() == ["column_39", "-"]
    records(["session", "reward"], [[name, 0.5], [name, -1.0]])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["session", "reward"] and [row.split()[0] for row in rows] == [name, name]
    records(["n"], [])
    assert capsys.readouterr().out.split() == ["n"]


def test_ids_stay_whole_in_a_table_that_doesnt_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "s1-abcdefghijklmnopqrst-0"
    for width in (80, 20):
        monkeypatch.setattr(console, "width", width)
        table("", ["session", "detail"], [[name, "word " * 40]])
        printed = capsys.readouterr().out
        assert (name in printed) == (width == 80)
        assert printed.count("word") == 40
