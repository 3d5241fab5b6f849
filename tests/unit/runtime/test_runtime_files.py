"""Files in hostile directories, archives, trees and patches."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_common.errors import CommandFailed, ResourceExhausted, RuntimeFault
from polar_runtime import archive, pack_files
from polar_runtime.archive import entries, key
from polar_runtime.beneath import Beneath, Outside, TooMuch, remove_tree
from polar_runtime.couriered import _parsed
from polar_runtime.gitstore import GitStore, Node


def nodes(directory: Path) -> list[Node]:
    root = Beneath(directory)
    return [Node(f.path, f.mode, f.size, partial(root.content, f), f.stamp) for f in root.nodes()]


def test_links_in_the_way_are_replaced_and_never_followed(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "kept").write_text("kept")
    (inside / "dir").symlink_to(outside)
    (inside / "file").symlink_to(outside / "kept")
    root = Beneath(inside)
    with pytest.raises(OSError, match="file"):
        root.read("file")
    with pytest.raises(OSError, match="dir"):
        root.read("dir/kept")
    root.write("dir/kept", b"mine")
    root.write("file", b"mine", 0o4755)
    assert (outside / "kept").read_text() == "kept"
    assert (inside / "dir").is_dir() and not (inside / "dir").is_symlink()
    assert (inside / "file").stat().st_mode & 0o7777 == 0o755
    root.remove("dir/kept")
    assert not (inside / "dir").exists()
    root.remove("never/was")
    root.write("file/now/below", b"x")
    assert root.read(b"file/now/below") == b"x"


@pytest.mark.parametrize("path", ["", ".", "/", "..", "a/../b", "/etc/passwd", "a\0b", "../x"])
def test_paths_that_lead_outside_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(Outside):
        Beneath(tmp_path).write(path, b"x")


def test_a_walk_leaves_out_repositories_and_special_files(tmp_path: Path) -> None:
    for path in ("b/.git/config", ".git/HEAD", "b/c/d", "a"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "tool").write_text("#!")
    (tmp_path / "tool").chmod(0o755)
    root = Beneath(tmp_path)
    assert [(f.path, f.mode) for f in root.nodes()] == [
        (b"a", "100644"), (b"b/c/d", "100644"), (b"link", "120000"), (b"tool", "100755"),
    ]  # fmt: skip
    assert [f.path for f in root.nodes("b")] == [b"b/c/d"]
    assert [f.path for f in root.nodes("a")] == [b"a"]
    assert root.nodes("nowhere") == []
    with pytest.raises(TooMuch):
        root.read("tool", 1)
    with pytest.raises(OSError, match="regular"):
        root.read("pipe")


def test_remove_tree_takes_whatever_is_there(tmp_path: Path) -> None:
    target = tmp_path / "-rf weird\nname"
    (target / "a" / "b").mkdir(parents=True)
    (target / "a" / "b" / "f").write_text("x")
    (target / "link").symlink_to(tmp_path)
    (target / "a").chmod(0)
    remove_tree(target)
    assert list(tmp_path.iterdir()) == []
    remove_tree(target)


def test_packed_archives_are_deterministic_and_come_back() -> None:
    files = {"b/c.txt": b"2", "a": b"1", "é/ü": b"\0\xff"}
    packed = pack_files(files)
    assert packed == pack_files(dict(reversed(list(files.items()))))
    assert {e.path: e.data for e in entries(packed, max_bytes=100)} == files


def test_size_limits_count_what_is_unpacked() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        info = tarfile.TarInfo("zeros")
        info.size = 10_000_000
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    assert len(out.getvalue()) < 100_000
    with pytest.raises(ResourceExhausted):
        entries(out.getvalue(), max_bytes=9_999_999)
    assert len(entries(out.getvalue(), max_bytes=10_000_000)) == 1
    with pytest.raises(ResourceExhausted):
        entries({"a": b"12", "b": b"3"}, max_bytes=2)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.REGTYPE])
def test_nothing_of_an_archive_is_unpacked_without_bound(kind: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_MAX_BYTES", 1 << 20)
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 50 << 20
    bomb = gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(info.size + 1024))
    tracemalloc.start()
    try:
        with pytest.raises(ResourceExhausted):
            entries(bomb, max_bytes=1 << 40)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=200)
@given(st.binary(max_size=2000))
def test_no_bytes_crash_the_archive_reader(data: bytes) -> None:
    try:
        found = entries(data, max_bytes=10_000)
    except RuntimeFault:
        return
    assert all(".." not in e.path.split("/") and not e.path.startswith("/") for e in found)


@pytest.mark.parametrize(
    ("asked", "relative", "found", "expected"),
    [
        ("a.txt", "a.txt", b"a.txt", "a.txt"),
        ("dir", "dir", b"dir/x/y", "dir/x/y"),
        ("dir/", "dir", b"dir/x", "dir/x"),
        (".", ".", b"x", "./x"),
        ("/home/agent", ".", b"x", "/home/agent/x"),
    ],
)
def test_downloads_are_named_as_they_were_asked_for(asked: str, relative: str, found: bytes, expected: str) -> None:
    assert key(asked, relative, found) == expected


_PATH = st.lists(
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=6)
    .filter(lambda s: s not in (".", "..") and s.lower() != ".git")
    .map(str.encode),
    min_size=1,
    max_size=3,
).map(b"/".join)
_TREE = st.dictionaries(_PATH, st.tuples(st.sampled_from(["100644", "100755"]), st.binary(max_size=60)), max_size=6)


def _consistent(tree: dict[bytes, tuple[str, bytes]]) -> bool:
    return not any(a != b and b.startswith(a + b"/") for a in tree for b in tree)


@settings(max_examples=25, deadline=None)
@given(_TREE.filter(_consistent), _TREE.filter(_consistent))
def test_any_patch_applies_to_what_it_was_made_from(
    before: dict[bytes, tuple[str, bytes]], after: dict[bytes, tuple[str, bytes]]
) -> None:
    def tree(files: dict[bytes, tuple[str, bytes]]) -> list[Node]:
        return [Node(p, m, len(d), lambda d=d: d) for p, (m, d) in sorted(files.items())]  # type: ignore[misc]

    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        store = GitStore(Path(directory) / "git")
        first, second = store.write(tree(before)), store.write(tree(after))
        patch = store.diff(first, second)
        assert (patch == b"") == (before == after)
        if patch:
            made = dict(before)
            for change in store.apply(first, patch):
                if change.read is None:
                    del made[change.path]
                else:
                    made[change.path] = (change.mode, change.read())
            assert made == after


def test_unchanged_files_are_not_read_again_and_changed_ones_are(tmp_path: Path) -> None:
    work, store = tmp_path / "work", GitStore(tmp_path / "git")
    work.mkdir()
    (work / "a").write_text("one")
    os.utime(work / "a", (1, 1))
    stamped = [Node(n.path, n.mode, n.size, n.read, n.stamp or (1,)) for n in nodes(work)]
    first = store.write(stamped)

    def unread() -> bytes:
        raise AssertionError("was read again")

    assert store.write([Node(b"a", "100644", 3, unread, stamped[0].stamp)]) == first
    changed = store.write([Node(b"a", "100644", 3, lambda: b"two", (2,))])
    assert changed != first
    assert b"-one\n" in store.diff(first, changed) and b"+two\n" in store.diff(first, changed)


def test_fresh_files_have_no_stamp(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("x")
    assert Beneath(tmp_path).nodes()[0].stamp is None


def test_files_that_vanish_during_the_walk_are_left_out(tmp_path: Path) -> None:
    def gone() -> bytes:
        raise FileNotFoundError("gone")

    store = GitStore(tmp_path / "git")
    assert store.write([Node(b"a", "100644", 1, gone), Node(b"b", "100644", 1, lambda: b"x")]) == store.write(
        [Node(b"b", "100644", 1, lambda: b"x")]
    )


def test_limits_of_trees_and_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = GitStore(tmp_path / "git", max_bytes=100, max_patch=100)
    # Dead before what is still buffered for it can be written.
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: (process.send_signal(9), process.wait()))
    empty = store.write([])
    with pytest.raises(ResourceExhausted) as caught:
        store.write([Node(b"a", "100644", 101, lambda: bytes(101))])
    assert caught.value.resource == "disk"
    noise = os.urandom(90)
    with pytest.raises(ResourceExhausted) as caught:
        store.diff(empty, store.write([Node(b"a", "100644", 90, lambda: noise)]))
    assert caught.value.resource == "patch"
    with pytest.raises(CommandFailed):
        store.apply(empty, b"diff --git a/x b/x\n")


def test_a_patch_of_next_to_nothing_that_unpacks_to_a_lot_is_refused(tmp_path: Path) -> None:
    """Neither made nor applied: git would hold all of it in memory. What was there before doesn't count."""
    large, rest = Node(b"zeros", "100644", 1 << 20, lambda: bytes(1 << 20)), Node(b"a", "100644", 2, lambda: b"a\n")
    store, strict = GitStore(tmp_path / "git"), GitStore(tmp_path / "strict", max_changed=(1 << 20) - 1)
    patch = store.diff(store.write([rest]), store.write([rest, large]))
    assert len(patch) < 1 << 13
    text = store.diff(store.write([]), store.write([Node(b"t", "100644", 1 << 20, lambda: b"x\n" * (1 << 19))]))
    for what in (lambda: strict.check_changed([rest, large]), lambda: strict.apply(strict.write([rest]), patch),
                 lambda: strict.apply(strict.write([]), text)):  # fmt: skip
        with pytest.raises(ResourceExhausted, match="of changed files") as caught:
            what()
        assert caught.value.resource == "patch"
    strict.write([Node(large.path, large.mode, large.size, large.read, (1,))])
    strict.check_changed([rest, Node(large.path, large.mode, large.size, large.read, (1,))])
    assert [c.path for c in store.apply(store.write([rest]), patch)] == [b"zeros"]
    both = strict.write([rest, large])
    assert [c.path for c in strict.apply(both, strict.diff(both, strict.write([rest])))] == [b"zeros"]


def test_the_users_git_configuration_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[diff]\n\tnoprefix = true\n\texternal = false\n[core]\n\tautocrlf = true\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    store = GitStore(tmp_path / "git")
    patch = store.diff(store.write([]), store.write([Node(b"a", "100644", 3, lambda: b"x\r\n")]))
    assert b"+++ b/a\n" in patch and b"+x\r\n" in patch
    done = subprocess.run(["git", "apply", "--stat", "-"], input=patch, capture_output=True, cwd=tmp_path, env={})
    assert done.returncode == 0 and b"1 insertion(+)" in done.stdout


_NOT_LISTINGS = [b"", b"100644", b"100644 x - a", b"100644 1 - ../a", b"777 1 - a", b"100644 -1 - a"]
_NOT_LISTINGS += [b"100644 1 - .git/x", b"100644 1 - a/.GIT", b"100644 1 a,b a", b"100644 1 - /a"]


@pytest.mark.parametrize("record", _NOT_LISTINGS)
def test_listings_from_containers_are_read_as_data(record: bytes) -> None:
    with pytest.raises(RuntimeFault):
        _parsed(record)
