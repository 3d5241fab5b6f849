"""Gemini CLI: Google generateContent."""

from __future__ import annotations

from polar_common.built_in import GeminiCliArgs, read_args
from polar_gateway.harnesses.base import ARGS, Exit, Harness, Launch, LaunchContext, Recipe, dump, placed

__all__ = ["GeminiCli"]

_PACKAGE = "@google/gemini-cli"
_CLI = f"node_modules/{_PACKAGE}/bundle/gemini.js"


class GeminiCli(Harness):
    """Arguments: `mcp_servers`, `skills`, `options`.

    It starts itself again as a child that outlives a signal to the parent, so the whole group is signalled. The folder
    must be trusted, or tool calls are asked about. At a full context it ends with 0 and says nothing.
    """

    name = "gemini_cli"
    version = "0.61.0"
    recipe = Recipe("npm", (f"{_PACKAGE}@{version}",), node=(20, 0), probe=_CLI)
    apis = ("google",)
    known_args = frozenset(GeminiCliArgs.model_fields)
    stops_group_only = True

    def launch(self, ctx: LaunchContext) -> Launch:
        self.check(ctx)
        args = read_args(GeminiCliArgs, ctx.args, ARGS)
        settings: dict[str, object] = {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False, "disableAutoUpdate": True, "disableUpdateNag": True},
            "security": {"auth": {"selectedType": "gemini-api-key"}},
            "mcpServers": args.mcp_servers,
        }
        argv = [f"{ctx.toolchain}/bin/node", f"{ctx.toolchain}/{_CLI}", "--yolo", "--skip-trust", "-m", ctx.model]
        return Launch(
            (*argv, *args.options),
            {"GEMINI_API_KEY": ctx.api_key, "GOOGLE_GEMINI_BASE_URL": ctx.base_url},
            {f"{ctx.home}/.gemini/settings.json": dump(settings)},
            stdin=ctx.instruction.encode(),
            folders=placed(args.skills, f"{ctx.home}/.gemini/skills"),
        )

    def classify_exit(self, exit_code: int, output_tail: str) -> Exit:
        """Its own codes: 41 authentication, 42 input, 53 the number of turns is used up."""
        if exit_code == 53:
            return Exit("budget_exhausted", "the number of turns is used up")
        return super().classify_exit(exit_code, output_tail)
