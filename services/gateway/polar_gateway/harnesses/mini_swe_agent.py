"""mini-swe-agent: OpenAI Chat, unstreamed, one tool."""

from __future__ import annotations

from polar_common.built_in import MiniSweAgentArgs, read_args
from polar_gateway.harnesses.base import ARGS, Exit, Harness, Launch, LaunchContext, Recipe

__all__ = ["MiniSweAgent"]


class MiniSweAgent(Harness):
    """Arguments: `options`.

    It ends only when the model submits through its tool; three answers without a tool call end it with 0 all the same.
    """

    name = "mini_swe_agent"
    version = "2.4.6"
    recipe = Recipe("pip", (f"mini-swe-agent=={version}", "litellm==1.110.2"), probe="venv/bin/python")
    apis = ("openai-chat",)
    known_args = frozenset(MiniSweAgentArgs.model_fields)

    def launch(self, ctx: LaunchContext) -> Launch:
        self.check(ctx)
        args = read_args(MiniSweAgentArgs, ctx.args, ARGS)
        argv = [f"{ctx.toolchain}/venv/bin/python", "-m", "minisweagent.run.mini", "-m", f"openai/{ctx.model}", "-y"]
        argv += ["--exit-immediately", "-o", f"{ctx.home}/trajectory.json", *args.options]
        env = {
            "OPENAI_API_KEY": ctx.api_key,
            "OPENAI_API_BASE": f"{ctx.base_url}/v1",
            "OPENAI_BASE_URL": f"{ctx.base_url}/v1",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{ctx.home}/.mini",
        }
        # One argument with `=`: a task that begins with a dash would otherwise be read as an option.
        return Launch((*argv, f"--task={ctx.instruction}"), env)

    def classify_exit(self, exit_code: int, output_tail: str) -> Exit:
        """It ends with 0 after giving up on answers that it can't read."""
        if exit_code == 0 and "LimitsExceeded" in output_tail:
            return Exit("budget_exhausted", "its own step or cost limit")
        return super().classify_exit(exit_code, output_tail)
