"""pi: a small coding agent with four tools. Speaks any of the four model APIs."""

from __future__ import annotations

from polar_common.built_in import PiArgs, read_args
from polar_gateway.harnesses.base import ARGS, Harness, Launch, LaunchContext, Recipe, dump

__all__ = ["Pi"]

_PACKAGE = "@mariozechner/pi-coding-agent"
_CLI = f"node_modules/{_PACKAGE}/dist/cli.js"
# Its name for an API, and what it expects behind the base URL.
_APIS = {
    "openai-chat": ("openai-completions", "/v1"),
    "openai-responses": ("openai-responses", "/v1"),
    "anthropic": ("anthropic-messages", ""),
    "google": ("google-generative-ai", "/v1beta"),
}


class Pi(Harness):
    """Arguments: `api` (one of `apis`), `tools` (names to enable), `skills` (folders), `options` (more of its own
    command-line options). It has no permission system and makes no other network calls.

    The instruction goes in by standard input, for as an argument a leading `-` or `@` would mean something else; pi
    strips white space around it.
    """

    name = "pi"
    version = "0.73.1"
    recipe = Recipe("npm", (f"{_PACKAGE}@{version}",), node=(20, 6), probe=_CLI)
    apis = ("openai-chat", "openai-responses", "anthropic", "google")
    known_args = frozenset(PiArgs.model_fields)

    def launch(self, ctx: LaunchContext) -> Launch:
        self.check(ctx)
        args = read_args(PiArgs, ctx.args, ARGS)
        api, path = _APIS[args.api]
        compaction = _compaction(ctx.context_window)
        model = {
            "id": ctx.model,
            # Beyond this less the reserve a summary is made when the work is over, which nobody reads; a context that
            # overflows is summed up, and gone on with, whatever is said here.
            "contextWindow": ctx.context_window + compaction["reserveTokens"],
            "maxTokens": ctx.max_tokens_per_call,
            "reasoning": False,
            "input": ["text"],
        }
        provider = {"baseUrl": ctx.base_url + path, "api": api, "apiKey": ctx.api_key, "models": [model]}
        retry = {"maxRetries": ctx.retries, "provider": {"timeoutMs": int(ctx.call_timeout_s * 1000), "maxRetries": 0}}
        argv = [f"{ctx.toolchain}/bin/node", f"{ctx.toolchain}/{_CLI}", "-p", "--mode", "text"]
        argv += ["--provider", "polar", "--model", ctx.model]
        if tools := args.tools:
            argv += ["--tools", ",".join(tools)]
        for skill in args.skills:
            argv += ["--skill", skill]
        return Launch(
            (*argv, *args.options),
            {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"},
            {
                f"{ctx.home}/.pi/agent/models.json": dump({"providers": {"polar": provider}}),
                f"{ctx.home}/.pi/agent/settings.json": dump({"retry": retry, "compaction": compaction}),
            },
            stdin=ctx.instruction.encode(),
        )


def _compaction(window: int) -> dict[str, int]:
    """Its own numbers suit windows of 128k and more; in a smaller one they'd leave nothing to sum up, or no room."""
    return {"reserveTokens": min(16_384, window // 8), "keepRecentTokens": min(20_000, window // 4)}
