"""lm-evaluation-harness: OpenAI Chat or legacy completions, many requests at once, no tools.

A benchmark isn't a conversation: each of its questions is one completion. The task's instruction isn't used; `tasks`
names what is run, and the task's files hold its definition.
"""

from __future__ import annotations

from polar_common.built_in import LmEvalArgs, read_args
from polar_gateway.harnesses.base import ARGS, Harness, Launch, LaunchContext, Recipe

__all__ = ["LmEval"]


class LmEval(Harness):
    """Arguments: `tasks` (names, required), `include_path` (a folder with task definitions, default the working
    directory), `limit`, `concurrent` (requests at once, default 2), `options`. Results go to `results/` there."""

    name = "lm_eval"
    version = "0.4.13"
    recipe = Recipe("pip", (f"lm-eval[api]=={version}",), probe="venv/bin/python")
    apis = ("openai-chat",)
    known_args = frozenset(LmEvalArgs.model_fields)

    def launch(self, ctx: LaunchContext) -> Launch:
        self.check(ctx)
        args = read_args(LmEvalArgs, ctx.args, ARGS)
        model = {
            "model": ctx.model,
            "base_url": f"{ctx.base_url}/v1/chat/completions",
            "num_concurrent": str(args.concurrent),
            "max_retries": str(ctx.retries),
            "max_gen_toks": str(ctx.max_tokens_per_call),
            "timeout": str(int(ctx.call_timeout_s)),
        }
        argv = [f"{ctx.toolchain}/venv/bin/python", "-m", "lm_eval", "run", "--model", "local-chat-completions"]
        argv += ["--model_args", ",".join(f"{k}={v}" for k, v in model.items()), "--apply_chat_template"]
        argv += ["--tasks", ",".join(args.tasks), "--include_path", args.include_path or ctx.workdir]
        argv += ["--output_path", f"{ctx.workdir}/results", "--log_samples"]
        if args.limit is not None:
            argv += ["--limit", f"{args.limit:g}"]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        return Launch((*argv, *args.options), {"OPENAI_API_KEY": ctx.api_key, **offline})
