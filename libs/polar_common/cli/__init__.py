"""The command `polar`. Commands of services and libraries are entry points (`polar.commands`), loaded when used."""

from .main import main

__all__ = ["main"]
