"""What this proxy can and can't capture, and why: for `polar doctor`, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from polar_common.errors import EngineError

if TYPE_CHECKING:
    from .engines.pool import Replica
    from .service import ProxyService

__all__ = ["Finding", "diagnose"]


@dataclass(frozen=True)
class Finding:
    """One line. `warn`: works with a restriction; `fail`: doesn't work, or can't be trained."""

    area: str
    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str = ""


async def diagnose(service: ProxyService) -> list[Finding]:
    """Engines (probed anew), start-up proof, seals."""
    found: list[Finding] = []
    for replica in service.pool.replicas:
        found += await _engine(replica)
    found += _proof(service)
    window = service.window
    found.append(
        Finding("model", "context window", "ok" if window else "warn", f"{window} tokens" if window else "unknown")
    )
    ready = service.seals.ready
    found.append(Finding("log", "seals", "ok" if ready else "fail", "followed" if ready else "the follower is lost"))
    return found


async def _engine(replica: Replica) -> list[Finding]:
    name = replica.engine.replica
    try:
        await replica.probe()
    except EngineError as error:
        replica.healthy = False
        return [Finding("engine", name, "fail", str(error))]
    told = replica.capabilities
    assert told is not None
    version = f" {told.engine_version}" if told.engine_version else ""
    found = [Finding("engine", name, "ok", f"{told.engine}{version} serves {told.model}")]
    trained: Literal["ok", "fail"] = "ok" if told.logprobs != "none" and told.ids_out else "fail"
    found.append(Finding("engine", f"{name}: log-probs", trained, told.logprobs))
    for feature, there, without in (
        ("reports the prompt's ids", told.reports_prompt, "context_exact can't be checked"),
        ("version spans", told.versions, "one version is recorded per completion"),
        ("weight update", told.weight_update, "policy.published has no effect"),
        ("structured output", told.guides, "response formats are recorded as dropped"),
        ("images", told.images, "images are refused or replaced"),
    ):
        found.append(Finding("engine", f"{name}: {feature}", "ok" if there else "warn", "" if there else without))
    found += [Finding("engine", f"{name}: probe", "fail", problem) for problem in told.problems]
    return found


def _proof(service: ProxyService) -> list[Finding]:
    renderer = service.renderers.keep
    proof, told = renderer.prove(), renderer.provenance
    found = [
        Finding(
            "context", "exact", "ok" if proof.exact else "fail",
            f"{told.renderer} {told.renderer_version}, {proof.history} history"
            if proof.exact else "continued calls are rendered in full and begin new chains",
        )
    ]  # fmt: skip
    found += [Finding("context", c.feature, "ok" if c.ok else "warn", c.reason) for c in proof.checks]
    if not renderer.close_ids:
        found.append(Finding("context", "close", "warn", "turns cut by length can't be continued exactly"))
    return found
