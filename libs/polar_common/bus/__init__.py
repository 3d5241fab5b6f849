"""The one way onto the log: publishes that happen once, fenced transitions, batches, session reads, leased work."""

from .client import Bus, Published, Stored
from .follow import follow, scan
from .poison import Failure
from .work import Lease, Worker

__all__ = ["Bus", "Failure", "Lease", "Published", "Stored", "Worker", "follow", "scan"]
