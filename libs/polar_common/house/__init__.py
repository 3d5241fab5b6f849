"""A whole house on one machine: its directory, its processes, and how a client finds it."""

from .layout import House, HouseFile, find_house

__all__ = ["House", "HouseFile", "find_house"]
