"""Codex CLI: OpenAI Responses. A static native program; it runs in any Linux image."""

from __future__ import annotations

import json
from collections.abc import Mapping

from polar_common.built_in import CodexArgs, read_args
from polar_gateway.harnesses.base import ARGS, Harness, Launch, LaunchContext, Recipe, placed

__all__ = ["Codex"]

_BINARY = "node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"


class Codex(Harness):
    """Arguments: `mcp_servers`, `skills`, `options`.

    A provider of its own is configured, since the built-in one first tries a WebSocket. It keeps finished items of a
    cut stream and executes their tools, so its stream retries aren't disabled but bounded. Plugins and apps are off:
    they look for hosts that a sandbox doesn't reach.
    """

    name = "codex"
    version = "0.171.0"
    recipe = Recipe("npm", (f"@openai/codex@{version}",), probe=_BINARY)
    apis = ("openai-responses",)
    known_args = frozenset(CodexArgs.model_fields)
    session_header = "session-id"
    subagent_header = "x-openai-subagent"

    def launch(self, ctx: LaunchContext) -> Launch:
        self.check(ctx)
        args = read_args(CodexArgs, ctx.args, ARGS)
        argv = (f"{ctx.toolchain}/{_BINARY}", "exec", "--skip-git-repo-check", "--json")
        env = {"POLAR_API_KEY": ctx.api_key, "CODEX_HOME": f"{ctx.home}/.codex"}
        files = {f"{ctx.home}/.codex/config.toml": self._config(ctx, args)}
        return Launch(
            (*argv, *args.options, "-"),
            env,
            files,
            stdin=ctx.instruction.encode(),
            folders=placed(args.skills, f"{ctx.home}/.codex/skills"),
        )

    def _config(self, ctx: LaunchContext, args: CodexArgs) -> str:
        sections: dict[str, dict[str, object]] = {
            "": {
                "model": ctx.model,
                "model_provider": "polar",
                "model_context_window": ctx.context_window,
                "approval_policy": "never",
                "sandbox_mode": "danger-full-access",
                "check_for_update_on_startup": False,
            },
            "model_providers.polar": {
                "name": "polar",
                "base_url": f"{ctx.base_url}/v1",
                "env_key": "POLAR_API_KEY",
                "wire_api": "responses",
                # Its two kinds of retries multiply; those of the stream cover a refused request too.
                "request_max_retries": 0,
                "stream_max_retries": ctx.retries,
                "stream_idle_timeout_ms": int(ctx.call_timeout_s * 1000),
            },
            "features": {"plugins": False, "apps": False},
            "analytics": {"enabled": False},
        }
        for name, server in args.mcp_servers.items():
            sections[f"mcp_servers.{json.dumps(name)}"] = server
        return "\n".join(_section(name, values) for name, values in sections.items())


def _section(name: str, values: Mapping[str, object]) -> str:
    lines = [f"[{name}]"] if name else []
    return "\n".join([*lines, *(f"{key} = {_toml(value)}" for key, value in values.items()), ""])


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    # JSON's strings, numbers and booleans are TOML's too, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
