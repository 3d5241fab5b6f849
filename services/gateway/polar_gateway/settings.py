"""What a gateway can be told. Environment: `POLAR_GATEWAY_*` beside the house's own `POLAR_*`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from polar_common.settings import HouseSettings

__all__ = ["GatewaySettings"]

_PROVIDERS = (
    "api.anthropic.com", "api.openai.com", "api.deepseek.com", "api.groq.com", "api.mistral.ai", "api.together.xyz",
    "api.x.ai", "chatgpt.com", "dashscope.aliyuncs.com", "generativelanguage.googleapis.com", "openrouter.ai",
)  # fmt: skip


class GatewaySettings(HouseSettings):
    """Sizes are sessions, times seconds, sizes of memory and disk MiB."""

    gateway_classes: tuple[str, ...] = ("local",)
    """Classes of work this gateway serves; each is a queue of its own."""
    gateway_init_slots: Annotated[int, Field(ge=1)] = 4
    """Runtimes being prepared at once: image pulls and unpacking load disk and network, not the engine."""
    gateway_ready: Annotated[int, Field(ge=1)] = 4
    """Prepared runtimes that may wait: enough that a freed RUNNING slot finds one at once, each holds its memory."""
    gateway_slots: Annotated[int, Field(ge=1)] = 8
    """Harnesses running at once."""
    gateway_postrun_slots: Annotated[int, Field(ge=1)] = 4
    """Attempts whose artifacts are collected at once."""
    gateway_root: Path | None = None
    """Where attempts' directories are; by default `DATA/run/attempts`. Shared only by gateways of one host."""
    gateway_proxy_socket: Path | None = None
    """The proxy's Unix socket; by default `DATA/run/proxy/proxy.sock`. Its directory is mounted into sandboxes, so it
    holds nothing else."""
    gateway_proxy_url: str = ""
    """The proxy's `http://host:port`, for runtimes without a network namespace of their own."""
    gateway_model_hosts: tuple[str, ...] = _PROVIDERS
    """`host` or `host:port` of models. Where a harness isn't kept from the network, a connection to one of them, or to
    one of `gateway_engines`, is recorded as a bypass of the proxy."""
    gateway_engines: tuple[str, ...] = ()
    """`host:port` of the engines behind the proxy."""
    gateway_isolation: Literal["auto", "bubblewrap", "none"] = "auto"
    gateway_init_s: Annotated[float, Field(gt=0)] = 600
    """At most this long in INIT, whatever the task allows."""
    gateway_daemon_wait_s: Annotated[float, Field(ge=0)] = 30
    """How long INIT waits for a Docker daemon that doesn't answer: it may be restarting. One that was never there is
    waited for only so long after the gateway's own start."""
    gateway_drain_s: Annotated[float, Field(ge=0)] = 5
    """After SIGTERM: how long running sessions may still finish before they are given up as lost."""
    gateway_drain_file: Path | None = None
    """While this file exists the gateway takes nothing new; what runs goes on to its end."""
    gateway_reap_s: Annotated[float, Field(gt=0)] = 30
    """Between two looks for leftovers of dead attempts."""
    gateway_key_grace_s: Annotated[float, Field(ge=0)] = 60
    """A session key outlives its attempt's deadline by this, for clocks that differ."""
    gateway_log_mb: Annotated[float, Field(gt=0)] = 8
    """Output kept per attempt; the rest is counted and dropped."""
    gateway_files_mb: Annotated[int, Field(ge=1)] = 64
    """Chosen files of an attempt together."""
    gateway_memory_mb: Annotated[int, Field(ge=16)] = 2048
    gateway_pids: Annotated[int, Field(ge=8)] = 512
    gateway_disk_mb: Annotated[int, Field(ge=1)] = 4096
    gateway_disk: Literal["watch", "loop"] = "watch"
    """How Docker attempts are kept to it. `watch`: what is written is looked at, and too much ends the attempt. `loop`:
    working directory, HOME and `/tmp` are on a disk of that size; needs root, loop devices and e2fsprogs."""
    gateway_context_window: Annotated[int, Field(ge=256)] = 32_768
    """Tokens of the model, told to harnesses that want to know."""
    gateway_max_tokens_per_call: Annotated[int, Field(ge=1)] = 4096
    """Told to harnesses where the task doesn't say."""
    gateway_call_timeout_s: Annotated[float, Field(gt=0)] = 600
    """How long harnesses shall wait for one model call."""
    gateway_metrics_port: int | None = None
    """Serve `/metrics` and `/health` there (0: any free port); by default nowhere."""

    @property
    def root(self) -> Path:
        return (self.gateway_root or self.data / "run" / "attempts").absolute()

    @property
    def proxy_socket(self) -> Path:
        return (self.gateway_proxy_socket or self.data / "run" / "proxy" / "proxy.sock").absolute()
