"""What every part of Polar shares: events, subjects, bus, blobs, settings, errors."""

__version__ = "0.1.0"
