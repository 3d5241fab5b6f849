"""Settings of the proxy. Environment: `POLAR_PROXY_*` beside the house's own `POLAR_*`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from polar_common.settings import HouseSettings

__all__ = ["ProxySettings"]


class ProxySettings(HouseSettings):
    """One proxy serves one policy model on one or more engine replicas."""

    proxy_engines: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """Base URLs of the replicas."""
    proxy_engine_kind: Literal["vllm", "sglang", "vllm_chat"] = "vllm"
    """`vllm` also fits the local engine. `vllm_chat` has no exact contexts: the engine's template makes the ids."""
    proxy_engine_token: SecretStr = SecretStr("")
    proxy_model: str = ""
    """The name under which the engines serve the policy; empty: the first one they list."""
    proxy_model_dir: Path | None = None
    """Tokenizer, template and configuration of the policy model."""
    proxy_template: str = ""
    """Empty: what fits the model; else `own`, a shipped template's name, or a path."""
    proxy_renderer: str = "auto"
    proxy_stop_tokens: tuple[str, ...] = ()
    """End-of-turn tokens that the model's configuration forgets."""
    proxy_context_window: Annotated[int, Field(ge=0)] = 0
    """Tokens; 0: the smaller of the model's and the engines'."""
    proxy_max_tokens: Annotated[int, Field(ge=1)] = 4096
    """Answer length where a harness names none."""
    proxy_logprob_kind: Literal["processed", "raw"] = "processed"
    """What vLLM was started with (`--logprobs-mode`); it doesn't tell."""
    proxy_unknown_model: Literal["serve", "refuse"] = "serve"
    """Harnesses name models we've never heard of: by default the policy serves them all."""
    proxy_images: Literal["refuse", "placeholder"] = "refuse"
    """What becomes of images that the engine can't take; a placeholder is recorded."""
    proxy_image_urls: Literal["refuse", "engine"] = "refuse"
    """Images named by an address: nothing is fetched here; `engine` passes the address on, for the engine to."""
    proxy_socket: Path | None = None
    """Unix socket for sandboxes without a network; default `<data>/run/proxy.sock`."""
    proxy_body_limit: Annotated[int, Field(ge=1)] = 32 << 20
    """Bytes of one request body."""
    proxy_header_limit: Annotated[int, Field(ge=1024)] = 64 << 10
    """Bytes of a request's head."""
    proxy_request_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds within which a request must have arrived in full: slow senders hold nothing."""
    proxy_stall_s: Annotated[float, Field(gt=0)] = 60.0
    """A client that takes nothing of its answer for this long counts as gone."""
    proxy_nesting: Annotated[int, Field(ge=8)] = 128
    """Depth of a request's JSON."""
    proxy_session_concurrency: Annotated[int, Field(ge=1)] = 32
    """Calls of one session at a time; beyond it 429."""
    proxy_session_rate: Annotated[float, Field(gt=0)] = 50.0
    """Calls per second of one session, averaged over ten seconds; beyond it 429."""
    proxy_concurrency: Annotated[int, Field(ge=1)] = 2048
    """Calls of all sessions at a time; beyond it 429."""
    proxy_choices: Annotated[int, Field(ge=1)] = 16
    """Largest `n`."""
    proxy_keepalive_s: Annotated[float, Field(gt=0)] = 10.0
    """A stream whose first token takes longer is opened before it, and kept alive."""
    proxy_engine_idle_s: Annotated[float, Field(gt=0)] = 600.0
    """An engine that sends nothing for this long is taken for dead."""
    proxy_health_s: Annotated[float, Field(gt=0)] = 2.0
    """Between two health checks of a replica."""
    proxy_wait_s: Annotated[float, Field(ge=0)] = 30.0
    """A call waits so long for an engine that is being updated or started; then it is 429 or 503."""
    proxy_drain: bool = False
    """Weight updates wait for running generations instead of swapping under them."""
    proxy_sessions: Annotated[int, Field(ge=1)] = 4096
    """Attempts kept in memory; the least recently used one is read from the log again."""
    proxy_thread_bytes: Annotated[int, Field(ge=0)] = 128 << 10
    """Requests larger than this are parsed and rendered off the event loop."""

    @property
    def socket_path(self) -> Path:
        return self.proxy_socket or self.data / "run" / "proxy.sock"

    @property
    def secrets(self) -> dict[str, bytes]:
        """HMAC secrets by key id."""
        return {"k1": self.secret.get_secret_value().encode()}
