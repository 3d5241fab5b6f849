"""lm-evaluation-harness: OpenAI Chat or legacy completions, many requests at once, no tools.

A benchmark isn't a conversation: each of its questions is one completion. The task's instruction isn't used; `tasks`
names what is run, and the task's files hold its definition.
"""

from __future__ import annotations

from polar_common.errors import ConfigError
from polar_gateway.harnesses.base import Harness, Launch, LaunchContext, Recipe, text, texts

__all__ = ["LmEval"]


class LmEval(Harness):
    """Arguments: `tasks` (names, required), `include_path` (a folder with task definitions, default the working
    directory), `limit`, `concurrent` (requests at once, default 2), `options`. Results go to `results/` there."""

    name = "lm_eval"
    version = "0.4.13"
    recipe = Recipe("pip", (f"lm-eval[api]=={version}",), probe="venv/bin/python")
    apis = ("openai-chat",)
    known_args = frozenset({"tasks", "include_path", "limit", "concurrent", "options"})

    def launch(self, ctx: LaunchContext) -> Launch:
        self.check(ctx)
        tasks = texts(ctx.args, "tasks")
        if not tasks:
            raise ConfigError("lm_eval needs at least one task", "harness.args.tasks")
        model = {
            "model": ctx.model,
            "base_url": f"{ctx.base_url}/v1/chat/completions",
            "num_concurrent": text(ctx.args, "concurrent", "2"),
            "max_retries": str(ctx.retries),
            "max_gen_toks": str(ctx.max_tokens_per_call),
            "timeout": str(int(ctx.call_timeout_s)),
        }
        argv = [f"{ctx.toolchain}/venv/bin/python", "-m", "lm_eval", "run", "--model", "local-chat-completions"]
        argv += ["--model_args", ",".join(f"{k}={v}" for k, v in model.items()), "--apply_chat_template"]
        argv += ["--tasks", ",".join(tasks), "--include_path", text(ctx.args, "include_path", ctx.workdir)]
        argv += ["--output_path", f"{ctx.workdir}/results", "--log_samples"]
        if limit := text(ctx.args, "limit"):
            argv += ["--limit", limit]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        return Launch((*argv, *texts(ctx.args, "options")), {"OPENAI_API_KEY": ctx.api_key, **offline})
