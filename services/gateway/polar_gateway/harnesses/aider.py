"""aider: OpenAI Chat, streamed, no tools; edits are read from the answer's text."""

from __future__ import annotations

from polar_common.built_in import AiderArgs, read_args
from polar_gateway.harnesses.base import ARGS, Exit, Harness, Launch, LaunchContext, Recipe, dump

__all__ = ["Aider"]


class Aider(Harness):
    """Arguments: `files` (those it may edit), `edit_format` (`whole`, `diff`, `udiff`), `options`.

    It ends with 0 even where the model refused it, so its output is read for that. Named files that don't exist are
    created empty before the first call.
    """

    name = "aider"
    version = "0.86.2"
    recipe = Recipe("pip", (f"aider-chat=={version}",), probe="venv/bin/python")
    apis = ("openai-chat",)
    known_args = frozenset(AiderArgs.model_fields)

    def launch(self, ctx: LaunchContext) -> Launch:
        self.check(ctx)
        args = read_args(AiderArgs, ctx.args, ARGS)
        message = f"{ctx.home}/.polar/message.txt"
        metadata = f"{ctx.home}/.polar/model.json"
        argv = [f"{ctx.toolchain}/venv/bin/python", "-m", "aider", "--model", f"openai/{ctx.model}"]
        argv += ["--edit-format", args.edit_format, "--yes-always"]
        argv += ["--no-git", "--no-analytics", "--analytics-disable", "--no-check-update", "--no-show-model-warnings"]
        argv += [
            "--no-show-release-notes",
            "--no-pretty",
            "--map-tokens",
            "0",
            "--timeout",
            str(int(ctx.call_timeout_s)),
        ]
        argv += ["--model-metadata-file", metadata, "--message-file", message]
        # Its histories would otherwise lie in the working directory and so in the patch.
        argv += ["--chat-history-file", f"{ctx.home}/chat.md", "--input-history-file", f"{ctx.home}/input.txt"]
        limits = {
            "max_input_tokens": ctx.context_window,
            "max_output_tokens": ctx.max_tokens_per_call,
            "litellm_provider": "openai",
            "mode": "chat",
        }
        env = {
            "OPENAI_API_KEY": ctx.api_key,
            "OPENAI_API_BASE": f"{ctx.base_url}/v1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        files = {message: ctx.instruction, metadata: dump({f"openai/{ctx.model}": limits})}
        argv += args.options
        return Launch((*argv, "--", *args.files), env, files)

    def classify_exit(self, exit_code: int, output_tail: str) -> Exit:
        """Errors of the model's side are only in the output."""
        if exit_code == 0:
            for sign in ("litellm.AuthenticationError", "litellm.BadRequestError", "litellm.APIConnectionError"):
                if sign in output_tail:
                    return super().classify_exit(1, output_tail)
            if "litellm.ContextWindowExceededError" in output_tail:
                return Exit("budget_exhausted", "the context window is full")
        return super().classify_exit(exit_code, output_tail)
