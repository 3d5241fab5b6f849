"""Claude Code: Anthropic Messages. A native program; no node is needed to run it."""

from __future__ import annotations

import json

from polar_common.built_in import ClaudeCodeArgs, read_args
from polar_gateway.harnesses.base import ARGS, Exit, Harness, Launch, LaunchContext, Recipe, dump, placed

__all__ = ["ClaudeCode"]

_BINARY = "node_modules/@anthropic-ai/claude-code-linux-x64/claude"


class ClaudeCode(Harness):
    """Arguments: `mcp_servers`, `skills`, `append_system_prompt`, `allowed_tools`, `disallowed_tools`, `max_turns`,
    `options`.

    Its Bash tool may be used without asking; as root it would refuse that unless told that it is in a sandbox. An
    unknown model name is accepted. A 401 makes it retry for minutes, so the number of retries is set.
    """

    name = "claude_code"
    version = "2.1.332"
    recipe = Recipe("npm", (f"@anthropic-ai/claude-code@{version}",), probe=_BINARY)
    apis = ("anthropic",)
    known_args = frozenset(ClaudeCodeArgs.model_fields)
    session_header = "x-claude-code-session-id"
    subagent_header = "x-claude-code-agent-id"

    def launch(self, ctx: LaunchContext) -> Launch:
        self.check(ctx)
        args = read_args(ClaudeCodeArgs, ctx.args, ARGS)
        argv = [f"{ctx.toolchain}/{_BINARY}", "-p", "--output-format", "json", "--model", ctx.model]
        argv += ["--dangerously-skip-permissions"]
        files = {}
        if found := args.mcp_servers:
            path = f"{ctx.home}/.polar/mcp.json"
            files[path] = dump({"mcpServers": found})
            argv += ["--mcp-config", path, "--strict-mcp-config"]
        if prompt := args.append_system_prompt:
            argv += ["--append-system-prompt", prompt]
        if args.allowed_tools:
            argv += ["--allowed-tools", ",".join(args.allowed_tools)]
        if args.disallowed_tools:
            argv += ["--disallowed-tools", ",".join(args.disallowed_tools)]
        if turns := args.max_turns:
            argv += ["--max-turns", str(turns)]
        env = self._environment(ctx)
        if args.skills:
            # By itself it lists skills in a fiftieth of the window, its own first: the task's wouldn't be seen.
            env["SLASH_COMMAND_TOOL_CHAR_BUDGET"] = "30000"
        return Launch(
            (*argv, *args.options),
            env,
            files,
            stdin=ctx.instruction.encode(),
            folders=placed(args.skills, f"{ctx.home}/.claude/skills"),
        )

    def _environment(self, ctx: LaunchContext) -> dict[str, str]:
        return {
            "ANTHROPIC_BASE_URL": ctx.base_url,
            "ANTHROPIC_API_KEY": ctx.api_key,
            "ANTHROPIC_SMALL_FAST_MODEL": ctx.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(ctx.context_window),
            # By itself it takes a window for full thousands of tokens before its end.
            "CLAUDE_CODE_BLOCKING_LIMIT_OVERRIDE": str(ctx.context_window),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(ctx.max_tokens_per_call),
            "CLAUDE_CODE_MAX_RETRIES": str(ctx.retries),
            "API_TIMEOUT_MS": str(int(ctx.call_timeout_s * 1000)),
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",
        }

    def classify_exit(self, exit_code: int, output_tail: str) -> Exit:
        """Its result is one JSON object, which says of an error what the exit code may not."""
        result = _result(output_tail)
        if result.get("subtype") == "error_max_turns":
            return Exit("budget_exhausted", "the number of turns is used up")
        if exit_code == 0 and result.get("is_error") is True:
            return super().classify_exit(1, str(result.get("result", "")))
        return super().classify_exit(exit_code, str(result.get("result") or output_tail))


def _result(tail: str) -> dict[str, object]:
    for line in reversed(tail.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                return {}
            return found if isinstance(found, dict) else {}
    return {}
