"""Qwen Code: OpenAI Chat."""

from __future__ import annotations

from polar_common.built_in import QwenCodeArgs, read_args
from polar_gateway.harnesses.base import ARGS, Harness, Launch, LaunchContext, Recipe, dump, placed

__all__ = ["QwenCode"]

_PACKAGE = "@qwen-code/qwen-code"
_CLI = f"node_modules/{_PACKAGE}/cli.js"


class QwenCode(Harness):
    """Arguments: `mcp_servers`, `skills`, `options`. Telemetry and updates are off by settings; every tool call
    is allowed.

    Without a finish reason in a stream it gives up after five tries; on 429 and 500 it goes on for more than a
    minute, for around the retries that can be set there are seven tries that can't.
    """

    name = "qwen_code"
    version = "0.24.4"
    recipe = Recipe("npm", (f"{_PACKAGE}@{version}",), node=(20, 0), probe=_CLI)
    apis = ("openai-chat",)
    known_args = frozenset(QwenCodeArgs.model_fields)

    def launch(self, ctx: LaunchContext) -> Launch:
        self.check(ctx)
        args = read_args(QwenCodeArgs, ctx.args, ARGS)
        settings: dict[str, object] = {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False, "disableAutoUpdate": True, "disableUpdateNag": True},
            "security": {"auth": {"selectedType": "openai"}},
            # After a first answer that calls no tool it has an agent write down what to remember, in a HOME that ends.
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
            "model": {
                "name": ctx.model,
                "generationConfig": {
                    "timeout": int(ctx.call_timeout_s * 1000),
                    "maxRetries": ctx.retries,
                    # Also of a stream that broke off: else it keeps half an answer and asks for the other half.
                    "retryErrorCodes": [500, 502, 503, 504, 529],
                    "retryInitialDelayMs": 1000,
                    "retryMaxDelayMs": 30_000,
                    # It sums up at 85 %, but 33,000 tokens before the end: in a small window, at once.
                    "contextWindowSize": max(ctx.context_window, ctx.context_window * 85 // 100 + 33_000),
                    "samplingParams": {"max_tokens": ctx.max_tokens_per_call},
                },
            },
            "mcpServers": args.mcp_servers,
        }
        argv = [f"{ctx.toolchain}/bin/node", f"{ctx.toolchain}/{_CLI}", "--yolo", "--auth-type", "openai"]
        return Launch(
            (*argv, *args.options),
            {
                "OPENAI_API_KEY": ctx.api_key,
                "OPENAI_BASE_URL": f"{ctx.base_url}/v1",
                "OPENAI_MODEL": ctx.model,
                "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            },
            {f"{ctx.home}/.qwen/settings.json": dump(settings)},
            stdin=ctx.instruction.encode(),
            folders=placed(args.skills, f"{ctx.home}/.qwen/skills"),
        )
