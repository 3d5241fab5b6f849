"""opencode: OpenAI Chat through its bundled compatible provider. A native program."""

from __future__ import annotations

from polar_common.built_in import OpenCodeArgs, read_args
from polar_gateway.harnesses.base import ARGS, Harness, Launch, LaunchContext, Recipe, dump, placed

__all__ = ["OpenCode"]

_BINARY = "node_modules/opencode-linux-x64/bin/opencode"


class OpenCode(Harness):
    """Arguments: `mcp_servers`, `skills`, `options`.

    It makes a second call for the session's title, and asks the npm registry once, in vain. Compaction happens only
    where the model's limits are told. An endless loop is its answer to a stream without a finish reason.
    """

    name = "opencode"
    version = "1.18.33"
    recipe = Recipe("npm", (f"opencode-ai@{version}",), probe=_BINARY)
    apis = ("openai-chat",)
    known_args = frozenset(OpenCodeArgs.model_fields)
    session_header = "x-session-id"
    subagent_header = "x-parent-session-id"

    def launch(self, ctx: LaunchContext) -> Launch:
        self.check(ctx)
        args = read_args(OpenCodeArgs, ctx.args, ARGS)
        limit = {"context": ctx.context_window, "output": ctx.max_tokens_per_call}
        model = {"name": ctx.model, "limit": limit}
        options = {"baseURL": f"{ctx.base_url}/v1", "apiKey": ctx.api_key, "timeout": int(ctx.call_timeout_s * 1000)}
        config: dict[str, object] = {
            "$schema": "https://opencode.ai/config.json",
            "autoupdate": False,
            "share": "disabled",
            "model": f"polar/{ctx.model}",
            "small_model": f"polar/{ctx.model}",
            "permission": {"*": "allow"},
            "provider": {
                "polar": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "polar",
                    "options": options,
                    "models": {ctx.model: model},
                }
            },
            "mcp": {name: _server(server) for name, server in args.mcp_servers.items()},
        }
        env = {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        }
        files = {f"{ctx.home}/.config/opencode/opencode.json": dump(config)}
        argv = (f"{ctx.toolchain}/{_BINARY}", "run", *args.options)
        folders = placed(args.skills, f"{ctx.home}/.config/opencode/skills")
        return Launch(argv, env, files, stdin=ctx.instruction.encode(), folders=folders)


def _server(server: dict[str, object]) -> dict[str, object]:
    if "url" in server:
        return {"type": "remote", "url": server["url"], "headers": server.get("headers", {})}
    arguments = server.get("args", [])
    more = list(arguments) if isinstance(arguments, list | tuple) else []
    return {"type": "local", "command": [server["command"], *more], "environment": server.get("env", {})}
