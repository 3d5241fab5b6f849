"""Removal of what dead attempts left on this host: at start and on a timer, by label, with the log asked who lives."""

from __future__ import annotations

import asyncio

import structlog

from polar_common.errors import ConfigError, PolarError
from polar_common.ids import segment_of
from polar_runtime import is_owned, reap

from . import metrics
from .handlers import Gateway
from .ledger import SessionLedger

__all__ = ["reap_once", "reap_until"]

_log = structlog.get_logger(__name__)


async def reap_once(gateway: Gateway) -> list[str]:
    """Labels of what was removed."""
    found = await reap(gateway.house.settings.root, lambda label: _is_live(gateway, label))
    if found:
        metrics.reaped.inc(len(found))
        _log.info("reaped", attempts=found)
    return found


async def reap_until(gateway: Gateway, stop: asyncio.Event) -> None:
    """Again and again until `stop`."""
    while not stop.is_set():
        try:
            await reap_once(gateway)
        except (PolarError, OSError) as error:
            _log.warning("reaping failed", error=repr(error))
        try:
            await asyncio.wait_for(stop.wait(), gateway.house.settings.gateway_reap_s)
        except TimeoutError:
            continue


async def _is_live(gateway: Gateway, label: str) -> bool:
    """In doubt it lives: of several gateways on one host each sees the others' attempts too."""
    if label in gateway.live:
        return True
    session, _, number = label.rpartition(".")
    try:
        segment = segment_of(session)
    except ConfigError:
        return True
    if not number.isdigit():
        return True
    bus = gateway.house.bus
    if not await bus.holds(segment):
        # It was dropped, for all of it was over.
        return False
    state = await SessionLedger(bus, session, int(number)).load()
    attempt = state.attempts.get(int(number))
    if attempt is None:
        # Another log's.
        return is_owned(gateway.house.settings.root / label)
    return not (state.terminal or attempt.over)
