"""pi: a small coding agent with four tools. Speaks any of the four model APIs."""

from __future__ import annotations

from polar_gateway.harnesses.base import Harness, Launch, LaunchContext, Recipe, choice, dump, texts

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
    known_args = frozenset({"api", "tools", "skills", "options"})

    def launch(self, ctx: LaunchContext) -> Launch:
        self.check(ctx)
        api, path = _APIS[choice(ctx.args, "api", self.apis)]
        model = {
            "id": ctx.model,
            "contextWindow": ctx.context_window,
            "maxTokens": ctx.max_tokens_per_call,
            "reasoning": False,
            "input": ["text"],
        }
        provider = {"baseUrl": ctx.base_url + path, "api": api, "apiKey": ctx.api_key, "models": [model]}
        retry = {"maxRetries": ctx.retries, "provider": {"timeoutMs": int(ctx.call_timeout_s * 1000), "maxRetries": 0}}
        argv = [f"{ctx.toolchain}/bin/node", f"{ctx.toolchain}/{_CLI}", "-p", "--mode", "text"]
        argv += ["--provider", "polar", "--model", ctx.model]
        if tools := texts(ctx.args, "tools"):
            argv += ["--tools", ",".join(tools)]
        for skill in texts(ctx.args, "skills"):
            argv += ["--skill", skill]
        return Launch(
            (*argv, *texts(ctx.args, "options")),
            {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"},
            {
                f"{ctx.home}/.pi/agent/models.json": dump({"providers": {"polar": provider}}),
                f"{ctx.home}/.pi/agent/settings.json": dump({"retry": retry}),
            },
            stdin=ctx.instruction.encode(),
        )
