"""Logs as files: compressed, hashed, resumable. What reads a log reads an archive as well (`ArchiveSource`).

`format.py` is the layout, `write.py` exports, `read.py` reads, `load.py` brings an archive back onto a server, and
`segments.py` is the life of a log segment: rolled, archived, sealed, dropped.
"""

from .format import FileEntry, Manifest, StreamEntry, read_manifest
from .load import load_archive
from .read import ArchiveSource, check_archive, read_archive
from .write import export

__all__ = [
    "ArchiveSource", "FileEntry", "Manifest", "StreamEntry", "check_archive", "export", "load_archive", "read_archive",
    "read_manifest",
]  # fmt: skip
