"""`polar verify`: audits a log as a file-system check audits a disk.

One pass over each stream puts facts into a temporary SQLite file (`facts.py`, so memory stays bounded whatever the
log's size); the checks (`checks.py`) are queries over them. What needs a service's code (rebuilding traces) comes
from the entry-point group `polar.verifiers`.
"""

from .audit import Options, Report, audit
from .facts import Facts
from .findings import CHECKS, Finding
from .sources import LiveSource, Source, fetch_blob

__all__ = ["CHECKS", "Facts", "Finding", "LiveSource", "Options", "Report", "Source", "audit", "fetch_blob"]
