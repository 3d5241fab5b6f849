"""Requests: what is refused, where it says so, and what a good one becomes."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_common.errors import ConfigError, RequestError
from polar_common.events import SessionAccepted, TaskAccepted
from polar_ingest.api import check_exposure
from polar_ingest.body import open_path
from polar_ingest.intake import Submission, pack_files, parse, task_events

GOOD: dict[str, Any] = {
    "id": "t",
    "instruction": "do",
    "harness": {"name": "command", "args": {"argv": ["agent"]}},
    "evaluator": {"command": "true"},
}


def read(value: Any, spec_limit: int = 1 << 20) -> list[Submission]:
    body = value if isinstance(value, bytes) else orjson.dumps(value)
    return parse(body, run="r", segment="s1", work_classes=("local",), spec_limit=spec_limit)


@pytest.mark.parametrize(
    ("value", "where", "status"),
    [
        (b"{", "body", 400),
        ([GOOD], "body", 400),
        ({}, "id", 400),
        ({**GOOD, "n": 3}, "n", 400),
        ({**GOOD, "samples": 0}, "samples", 400),
        ({**GOOD, "samples": 500}, "samples", 400),
        ({**GOOD, "samples": "many"}, "samples", 400),
        ({k: v for k, v in GOOD.items() if k != "harness"}, "harness", 400),
        ({**GOOD, "harness": {}}, "harness.name", 400),
        ({**GOOD, "harness": {"name": "command", "argss": {}}}, "harness.argss", 400),
        ({**GOOD, "instruction": ""}, "instruction", 400),
        ({**GOOD, "instruction": "x" * 1_000_001}, "instruction", 400),
        ({**GOOD, "runtime": {"kind": "moon"}}, "runtime.kind", 400),
        ({**GOOD, "runtime": {"work_class": "gpu"}}, "runtime.work_class", 400),
        ({**GOOD, "runtime": {"prepare": [{"exec": "x"}, {}]}}, "runtime.prepare[1].exec", 400),
        ({**GOOD, "limits": {"queue_s": 1e300}}, "limits.queue_s", 400),
        ({**GOOD, "callback": "file:///etc/passwd"}, "callback", 400),
        ({**GOOD, "callback": "http://user:pw@host/"}, "callback", 400),
        ({**GOOD, "callback": "http:///nohost"}, "callback", 400),
        ({**GOOD, "callback": "http://host:99999/"}, "callback", 400),
        ({**GOOD, "files": {"../x": ""}}, "files", 400),
        ({**GOOD, "files": {"a/./b": ""}}, "files['a/./b']", 400),
        ({**GOOD, "files": {"a": "", "a/b": ""}}, "files['a']", 400),
        ({**GOOD, "files": {"x" * 300: ""}}, "files['" + "x" * 80 + "']", 400),
        ({**GOOD, "metadata": {"k": "v" * 2_000_000}}, "metadata", 413),
        ({"tasks": []}, "tasks", 400),
        ({"tasks": GOOD}, "tasks", 400),
        ({"run": 3, "tasks": [GOOD]}, "run", 400),
        ({"run": "", "tasks": [GOOD]}, "run", 400),
        ({"runn": "r", "tasks": [GOOD]}, "runn", 400),
        ({"tasks": [GOOD, {**GOOD, "id": "u", "model": 7}]}, "tasks[1].model", 400),
        ({"tasks": [GOOD, {**GOOD, "instruction": "other"}]}, "tasks[1].id", 409),
    ],
)
def test_what_is_wrong_is_named(value: Any, where: str, status: int) -> None:
    with pytest.raises(RequestError) as caught:
        read(value)
    assert (caught.value.path, caught.value.status) == (where, status)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("changed", "where", "said"),
    [
        ({"harness": {"name": "comand"}}, "harness.name", "aider, claude_code, codex, command"),
        ({"harness": {"name": "my.module:"}}, "harness.name", "module:Class"),
        ({"harness": {"name": "pi@"}}, "harness.name", "no version"),
        ({"harness": {"name": "command"}}, "harness.args", "needs either `argv` or `script`"),
        ({"harness": {"name": "command", "args": {"argv": "ls"}}}, "harness.args.argv", "a list of texts"),
        ({"harness": {"name": "command", "args": {"argvs": ["ls"]}}}, "harness.args", "no argument 'argvs'"),
        ({"harness": {"name": "pi", "args": {"api": "smtp"}}}, "harness.args.api", "openai-chat"),
        ({"harness": {"name": "pi@0.70.1", "args": {"option": []}}}, "harness.args", "no argument 'option'"),
        ({"harness": {"name": "lm_eval"}}, "harness.args.tasks", "is needed"),
        ({"harness": {"name": "claude_code", "args": {"max_turns": 0}}}, "harness.args.max_turns", "1"),
        ({"evaluator": {}}, "evaluator.command", "needs a command"),
        ({"evaluator": {"command": "x", "reward_file": "/r"}}, "evaluator.reward_file", "working directory"),
        ({"evaluator": {"kind": "anser"}}, "evaluator.kind", "answer, command, humaneval"),
        ({"evaluator": {"kind": "answer", "args": {"expectd": "x"}}}, "evaluator.args", "no argument 'expectd'"),
        ({"evaluator": {"kind": "answer", "args": {}}}, "evaluator.args.expected", "is needed"),
        (
            {"evaluator": {"kind": "answer", "args": {"expected": ["ok", "("], "mode": "regex"}}},
            "evaluator.args.expected",
            "no regular expression",
        ),
        ({"evaluator": {"kind": "humaneval", "args": {"test": "x"}}}, "evaluator.args.entry_point", "is needed"),
        ({"runtime": {"kind": "dokcer", "work_class": "local"}}, "runtime.kind", "docker, local"),
    ],
)
def test_what_no_built_in_takes_is_refused_before_anything_runs(changed: dict[str, Any], where: str, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)) as caught:
        read({"tasks": [GOOD, {**GOOD, "id": "u", **changed}]})
    assert (caught.value.path, caught.value.status) == (f"tasks[1].{where}", 400)


def test_ones_own_classes_are_taken_as_they_are() -> None:
    own = {"name": "my.module:MyHarness", "args": {"anything": 1}}
    [one] = read({**GOOD, "harness": own, "evaluator": {"kind": "my.module:Judge", "args": {"x": []}}})
    assert one.spec.harness.args == {"anything": 1}


def test_the_same_task_twice_in_a_request_is_one() -> None:
    first, second = read({"run": "x", "tasks": [GOOD, dict(GOOD)]})
    assert (first.task, first.spec_hash, first.run) == (second.task, second.spec_hash, "x")


def test_defaults_written_out_are_the_same_body_and_changes_are_not() -> None:
    [plain], [spelled] = read(GOOD), read({**GOOD, "samples": 1, "limits": {"attempts": 3}})
    assert plain.spec_hash == spelled.spec_hash
    for change in ({"samples": 2}, {"files": {"a": ""}}, {"priority": 1}, {"limits": {"attempts": 4}}):
        assert read({**GOOD, **change})[0].spec_hash != plain.spec_hash


def test_runs_have_ids_of_their_own() -> None:
    [here] = read({"run": "a", "tasks": [GOOD]})
    [there] = read({"run": "b", "tasks": [GOOD]})
    assert here.task != there.task


def test_a_batch_has_the_task_and_each_sample() -> None:
    [one] = read({**GOOD, "samples": 3, "files": {"a": "b"}})
    task, *sessions = task_events(one, None)
    assert isinstance(task, TaskAccepted)
    assert (task.spec.files, task.sessions, task.spec_hash) == (
        {},
        tuple(f"{one.task}-{i}" for i in range(3)),
        one.spec_hash,
    )
    assert [(s.session, s.index, s.work_class) for s in sessions if isinstance(s, SessionAccepted)] == [
        (f"{one.task}-{i}", i, "local") for i in range(3)
    ]
    assert len(task_events(read({**GOOD, "samples": 499})[0], None)) == 500


def test_archives_are_the_same_for_the_same_files_and_say_nothing_else() -> None:
    one = pack_files({"b/run.sh": "#!/bin/sh\n", "a.txt": "é"})
    two = pack_files({"a.txt": "é", "b/run.sh": "#!/bin/sh\n"})
    assert hashlib.sha256(one).digest() == hashlib.sha256(two).digest()
    with tarfile.open(fileobj=io.BytesIO(one)) as tar:
        found = [(m.name, m.mode, m.mtime, m.uid, m.gid, m.uname, m.gname) for m in tar.getmembers()]
        body = tar.extractfile("a.txt")
        assert body is not None
        assert body.read().decode() == "é"
    assert found == [("a.txt", 0o644, 0, 0, 0, "", ""), ("b/run.sh", 0o755, 0, 0, 0, "", "")]


@pytest.mark.parametrize(
    ("prefix", "path"),
    [
        (b"", ""),
        (b'{"instruction": "xxxx', "instruction"),
        (b'{"id": "t", "instruction": "a \\" , \\"b', "instruction"),
        (b'{"run": "r", "tasks": [{"id": "a"}, {"id": "b", "instruction": "x', "tasks[1].instruction"),
        (b'{"tasks": [{"files": {"a.py": "x", "b.py": "yyy', "tasks[0].files.b.py"),
        (b'{"metadata": {"k": "v"}, "files": {', "files"),
        (b'{"a": [1, [2, 3, "x', "a[1][2]"),
        (b'{"key that brea', "key that brea"),
        (b'{"a": "\\', "a"),
    ],
)
def test_the_field_that_was_open_is_found(prefix: bytes, path: str) -> None:
    assert open_path(prefix) == path


SIBLINGS = st.recursive(
    st.text(max_size=20) | st.integers(-9, 9),
    lambda t: st.lists(t, max_size=3) | st.dictionaries(st.text(max_size=5), t),
)


@given(st.lists(st.text("abc", min_size=1, max_size=4) | st.integers(0, 3), min_size=1, max_size=5), SIBLINGS)
def test_any_path_is_found_whatever_stands_before_it(path: list[str | int], sibling: Any) -> None:
    value: Any = "END"
    for part in reversed(path):
        value = {"before": sibling, part: value} if isinstance(part, str) else [sibling] * part + [value]
    body = orjson.dumps({"root": value})
    expected = "root" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    assert open_path(body[: body.rindex(b"END") + 2]) == expected


def test_a_huge_string_of_quotes_is_read_in_linear_time() -> None:
    import time

    started = time.monotonic()
    assert open_path(b'{"instruction": "' + b'\\"' * 4_000_000) == "instruction"
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("host", "token", "fine"),
    [
        ("127.0.0.1", "", True),
        ("::1", "", True),
        ("localhost", "", True),
        ("127.8.8.8", "", True),
        ("0.0.0.0", "", False),
        ("10.0.0.1", "", False),
        ("example.org", "", False),
        ("0.0.0.0", "secret", True),
    ],
)
def test_others_are_asked_for_a_token(host: str, token: str, fine: bool) -> None:
    if fine:
        check_exposure(host, token)
    else:
        with pytest.raises(ConfigError, match="host"):
            check_exposure(host, token)
