"""What commands print: text from models and harnesses stays text."""

from __future__ import annotations

import pytest
from rich.text import Text

from polar_common.cli.output import console, table, warn

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
