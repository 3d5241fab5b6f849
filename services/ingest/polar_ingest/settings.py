"""Settings of ingest and its scheduler. Environment: `POLAR_INGEST_*` beside the house's own `POLAR_*`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from polar_common.settings import HouseSettings

__all__ = ["IngestSettings"]

Seconds = Annotated[float, Field(ge=0)]


class IngestSettings(HouseSettings):
    """All have defaults that suit a laptop and a small cluster alike."""

    ingest_body_limit: Annotated[int, Field(gt=0)] = 32 << 20
    """Bytes of a request body. Task files travel in it; larger inputs belong into an image."""
    ingest_spec_limit: Annotated[int, Field(gt=0)] = 2 << 20
    """Bytes of a task without its files: it is repeated in the `queued` event of each attempt."""
    ingest_queue_bound: Annotated[int, Field(gt=0)] = 10_000
    """Sessions accepted and not yet claimed; beyond it ingest answers 429."""
    ingest_headroom: Annotated[int, Field(ge=0)] = 1 << 30
    """Bytes that the log's store and disk must have left; below it nothing is admitted or released, and ingest answers
    503."""
    ingest_retry_after_s: Annotated[int, Field(ge=1)] = 5
    """What a 429 or 503 tells the client to wait."""
    ingest_release_ahead: Annotated[int, Field(gt=0)] = 64
    """Unclaimed released sessions per class: enough to keep gateways fed, few enough that priorities still count."""
    ingest_postrun_bound: Annotated[int, Field(gt=0)] = 64
    """Sessions whose harness has ended and that aren't terminal; at this many nothing more is released."""
    ingest_retry_delay_s: Seconds = 1.0
    """Pause before a second attempt, doubled for each further one: a fault of the house rarely mends at once."""
    ingest_exited_patience_s: Seconds = 15.0
    """How long an `exited` with a fault waits for its `artifacts` before the scheduler goes on without them."""
    ingest_owner_grace_s: Seconds = 300.0
    """After the session deadline, before a silent owner's session is closed."""
    ingest_evaluation_patience_s: Seconds = 1800.0
    """After artifacts and the evaluator's own timeout, before a session is closed without an evaluation."""
    ingest_obey_demand: bool = False
    """Open new groups only while fewer are in flight than trainers have asked for, and none while engines lag further
    behind a trainer's newest weights than it bears."""
    ingest_callback_for_s: Seconds = 600.0
    """How long a callback is tried before it goes to the dead letter."""
    ingest_callback_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """One try's limit for connecting and answering."""
    ingest_callback_slots: Annotated[int, Field(gt=0)] = 8
    """Callbacks under way at once, so that one slow receiver doesn't hold up the others."""
