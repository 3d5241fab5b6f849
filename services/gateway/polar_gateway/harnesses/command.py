"""Any program of the user's: a script, a Gym loop, an agent that isn't known by name.

It learns where the model is from the environment variables that the three providers' SDKs read; standard output is its
answer.
"""

from __future__ import annotations

from polar_common.built_in import CommandArgs, read_args
from polar_gateway.harnesses.base import ARGS, Harness, Launch, LaunchContext

__all__ = ["Command"]

# The kernel's limit for one environment string; a longer instruction is in the file and on standard input.
_MAX_ENV = 100_000


class Command(Harness):
    """Arguments: `argv`, a list of texts, or `script`, a shell script run by `/bin/sh`; and `env`, a mapping.

    Gets the instruction as `POLAR_INSTRUCTION` (left out above 100,000 bytes), as the file `POLAR_INSTRUCTION_FILE` and
    on standard input.
    """

    name = "command"
    version = ""
    apis = ("openai-chat", "openai-responses", "anthropic", "google")
    known_args = frozenset(CommandArgs.model_fields)

    def launch(self, ctx: LaunchContext) -> Launch:
        self.check(ctx)
        args = read_args(CommandArgs, ctx.args, ARGS)
        argv, script = args.argv, args.script
        instruction = f"{ctx.home}/.polar/instruction.txt"
        files = {instruction: ctx.instruction}
        if script:
            # A file, not `sh -c`: the script may be longer than one argument may be.
            path = f"{ctx.home}/.polar/script.sh"
            files[path] = script
            argv = ["/bin/sh", path]
        env = self._environment(ctx) | {"POLAR_INSTRUCTION_FILE": instruction}
        return Launch(tuple(argv), env | args.env, files, stdin=ctx.instruction.encode())

    def _environment(self, ctx: LaunchContext) -> dict[str, str]:
        env = {
            "OPENAI_BASE_URL": f"{ctx.base_url}/v1",
            "OPENAI_API_KEY": ctx.api_key,
            "ANTHROPIC_BASE_URL": ctx.base_url,
            "ANTHROPIC_API_KEY": ctx.api_key,
            "GOOGLE_GEMINI_BASE_URL": ctx.base_url,
            "GEMINI_API_KEY": ctx.api_key,
            "POLAR_MODEL": ctx.model,
            "POLAR_CONTEXT_WINDOW": str(ctx.context_window),
            "POLAR_MAX_TOKENS": str(ctx.max_tokens_per_call),
        }
        if len(ctx.instruction.encode()) < _MAX_ENV:
            env["POLAR_INSTRUCTION"] = ctx.instruction
        return env
