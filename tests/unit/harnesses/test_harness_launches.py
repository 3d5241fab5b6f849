"""What every harness's launch must hold, and what each one's own file promises."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from polar_common.built_in import EVALUATORS, HARNESSES, RUNTIMES
from polar_common.errors import ConfigError, HarnessError
from polar_evaluator.evaluators import registry as evaluators
from polar_gateway.harnesses import registry, toolchain
from polar_gateway.harnesses.base import Harness, Launch, LaunchContext, Recipe
from polar_runtime.registry import kinds

BASE = "http://127.0.0.1:41417/s/KEY"
CONTEXT = LaunchContext("Fix the bug", "/workspace", "/home/agent", BASE, "KEY", "some-model", 12345, 678)
ARGS: dict[str, dict[str, object]] = {"command": {"argv": ["agent"]}, "lm_eval": {"tasks": ["toy"]}}
NAMES = registry.names()
HEAVY = [n for n in NAMES if n != "command"]


def launch(name: str, **changes: object) -> Launch:
    args = changes.pop("args", None)
    merged = {**ARGS.get(name, {}), **(args if isinstance(args, dict) else {})}
    return registry.find(name).launch(replace(CONTEXT, args=merged, **changes))  # type: ignore[arg-type]


def everything(made: Launch) -> str:
    parts = [*made.argv, *made.env.values(), *made.files.values(), (made.stdin or b"").decode()]
    return "\n".join(parts)


@pytest.mark.parametrize("name", NAMES)
def test_a_launch_says_all_that_the_harness_must_know(name: str) -> None:
    made, harness = launch(name), registry.find(name)
    text = everything(made)
    assert BASE in text and "KEY" in text and "some-model" in text
    assert "127.0.0.1:41417" not in text.replace(BASE, "")
    if name != "lm_eval":
        assert "Fix the bug" in text
    if name not in ("mini_swe_agent", "gemini_cli", "codex"):
        assert "678" in text, "the token cap"
    assert made == launch(name), "the same context gives the same launch"
    assert all(path.startswith(("/home/agent/", "/workspace/")) for path in made.files)
    assert harness.name == name and (harness.version or name == "command")
    assert harness.recipe.kind == "none" or made.argv[0].startswith("/polar/harness/")
    if harness.recipe.kind == "npm":
        assert harness.recipe.packages[0].endswith(f"@{harness.version}")


@pytest.mark.parametrize("name", [n for n in NAMES if n != "lm_eval"])
def test_instructions_are_never_options_or_shell(name: str) -> None:
    nasty = "--help; $(touch /tmp/x) `id` ' \" \n @file -"
    made = launch(name, instruction=nasty)
    assert nasty in everything(made)
    for arg in made.argv:
        assert nasty not in arg or arg == f"--task={nasty}"
    assert made.argv[0] != "/bin/sh" or nasty not in made.argv


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="NUL"):
        launch(name, instruction="a\0b")
    with pytest.raises(ConfigError, match="no argument 'nonsense'"):
        launch(name, args={"nonsense": 1})
    known = registry.find(name).known_args
    for arg, value in (
        ("options", "not a list"), ("options", [1]), ("mcp_servers", ["x"]), ("mcp_servers", {"a": {}}),
        ("skills", "not a list"), ("skills", [1]),
    ):  # fmt: skip
        if arg in known:
            with pytest.raises(ConfigError, match=arg):
                launch(name, args={arg: value})


@pytest.mark.parametrize("name", NAMES)
def test_how_it_ended(name: str) -> None:
    harness = registry.find(name)
    assert harness.classify_exit(0, "all fine").kind == "finished"
    assert harness.classify_exit(1, "Traceback").kind == "harness_error"
    missing = harness.classify_exit(127, "polar: cannot start, /x: No such file")
    assert missing.kind == "harness_error" and "couldn't be started" in missing.reason
    full = harness.classify_exit(1, "This model's maximum context length is 10 tokens")
    assert full.kind == "budget_exhausted"
    assert harness.classify_exit(1, "Context is too large to send safely").kind == "budget_exhausted"


def test_exit_texts_of_single_harnesses() -> None:
    aider = registry.find("aider")
    assert aider.classify_exit(0, "litellm.AuthenticationError: no").kind == "harness_error"
    assert aider.classify_exit(0, "litellm.ContextWindowExceededError").kind == "budget_exhausted"
    claude = registry.find("claude_code")
    assert claude.classify_exit(0, '{"is_error":true,"result":"API Error: 500"}').kind == "harness_error"
    assert claude.classify_exit(1, '{"is_error":true,"result":"Prompt is too long"}').kind == "budget_exhausted"
    assert claude.classify_exit(1, '{"subtype":"error_max_turns","is_error":true}').kind == "budget_exhausted"
    assert claude.classify_exit(0, "{broken").kind == "finished"
    assert registry.find("gemini_cli").classify_exit(53, "").kind == "budget_exhausted"
    assert registry.find("mini_swe_agent").classify_exit(0, "Exit: LimitsExceeded").kind == "budget_exhausted"


def test_names_classes_and_typing_errors() -> None:
    assert len(HEAVY) == 9
    with pytest.raises(ConfigError, match="known: aider, claude_code, codex, command"):
        registry.find("claude")
    assert isinstance(registry.find("polar_gateway.harnesses.pi:Pi"), Harness)
    for name, text in ((":", "cannot load"), ("json:loads", "isn't a Harness"), ("no.such:Thing", "cannot load")):
        with pytest.raises(ConfigError, match=text):
            registry.find(name)


def test_command_takes_a_program_or_a_script() -> None:
    assert launch("command", args={"argv": ["python3", "x y"]}).argv == ("python3", "x y")
    scripted = registry.find("command").launch(replace(CONTEXT, args={"script": "echo $POLAR_MODEL"}))
    assert scripted.argv == ("/bin/sh", "/home/agent/.polar/script.sh")
    assert scripted.files["/home/agent/.polar/script.sh"] == "echo $POLAR_MODEL"
    env = scripted.env
    assert env["OPENAI_BASE_URL"] == f"{BASE}/v1" and env["ANTHROPIC_BASE_URL"] == env["GOOGLE_GEMINI_BASE_URL"] == BASE
    assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"] == env["GEMINI_API_KEY"] == "KEY"
    assert env["POLAR_INSTRUCTION"] == "Fix the bug" and scripted.stdin == b"Fix the bug"
    long = registry.find("command").launch(replace(CONTEXT, instruction="x" * 200_000, args={"argv": ["a"]}))
    assert "POLAR_INSTRUCTION" not in long.env and len(long.files[long.env["POLAR_INSTRUCTION_FILE"]]) == 200_000
    for bad in ({}, {"argv": ["a"], "script": "b"}, {"argv": "a"}, {"script": 1}, {"argv": ["a"], "env": {"A": 1}}):
        with pytest.raises(ConfigError, match=r"harness\.args"):
            registry.find("command").launch(replace(CONTEXT, args=bad))


_MCP = {"files": {"command": "srv", "args": ["-x", 'q"uote'], "env": {"A": "b"}}, "web.site": {"url": "http://h/mcp"}}


def test_mcp_servers_reach_each_harness_in_its_own_form() -> None:
    claude = launch("claude_code", args={"mcp_servers": _MCP})
    assert json.loads(claude.files["/home/agent/.polar/mcp.json"]) == {"mcpServers": _MCP}
    assert "--mcp-config" in claude.argv
    codex = tomllib.loads(launch("codex", args={"mcp_servers": _MCP}).files["/home/agent/.codex/config.toml"])
    assert codex["mcp_servers"] == _MCP
    assert codex["model_providers"]["polar"]["base_url"] == f"{BASE}/v1"
    assert codex["features"] == {"plugins": False, "apps": False}
    # It names settings that it doesn't know in every session's output, as an error.
    assert {k for k, v in codex.items() if not isinstance(v, dict)} == {
        "model", "model_provider", "model_context_window", "approval_policy", "sandbox_mode",
        "check_for_update_on_startup",
    }  # fmt: skip
    for name, path in (("qwen_code", ".qwen/settings.json"), ("gemini_cli", ".gemini/settings.json")):
        settings = json.loads(launch(name, args={"mcp_servers": _MCP}).files[f"/home/agent/{path}"])
        assert settings["mcpServers"] == _MCP
    config = launch("opencode", args={"mcp_servers": _MCP}).files["/home/agent/.config/opencode/opencode.json"]
    assert json.loads(config)["mcp"]["files"]["command"] == ["srv", "-x", 'q"uote']
    assert json.loads(config)["mcp"]["web.site"]["type"] == "remote"


_SKILLS = {
    "claude_code": ".claude/skills",
    "codex": ".codex/skills",
    "gemini_cli": ".gemini/skills",
    "opencode": ".config/opencode/skills",
    "qwen_code": ".qwen/skills",
}


@pytest.mark.parametrize("name", list(_SKILLS))
def test_skills_are_copied_to_where_each_harness_looks(name: str) -> None:
    made = launch(name, args={"skills": ["skills/pdf", "/home/agent/more/csv/"]})
    below = f"/home/agent/{_SKILLS[name]}"
    assert made.folders == {f"{below}/pdf": "skills/pdf", f"{below}/csv": "/home/agent/more/csv/"}
    assert launch(name).folders == {}
    for bad in (["a/pdf", "b/pdf"], [""], ["/"], ["x/.."]):
        with pytest.raises(ConfigError, match=r"harness\.args\.skills"):
            launch(name, args={"skills": bad})


def test_who_has_neither_tool_servers_nor_skills_says_so() -> None:
    for name in ("aider", "lm_eval", "mini_swe_agent", "command"):
        for arg in ("mcp_servers", "skills"):
            with pytest.raises(ConfigError, match=f"no argument '{arg}'"):
                launch(name, args={arg: []})


@pytest.mark.parametrize(
    ("api", "name", "url"),
    [
        ("openai-chat", "openai-completions", "/v1"),
        ("openai-responses", "openai-responses", "/v1"),
        ("anthropic", "anthropic-messages", ""),
        ("google", "google-generative-ai", "/v1beta"),
    ],
)
def test_pi_has_four_apis(api: str, name: str, url: str) -> None:
    made = launch("pi", args={"api": api, "tools": ["read", "bash"], "skills": ["/workspace/s"]})
    provider = json.loads(made.files["/home/agent/.pi/agent/models.json"])["providers"]["polar"]
    assert (provider["api"], provider["baseUrl"]) == (name, BASE + url)
    assert provider["models"][0]["maxTokens"] == 678
    compaction = json.loads(made.files["/home/agent/.pi/agent/settings.json"])["compaction"]
    assert provider["models"][0]["contextWindow"] - compaction["reserveTokens"] == 12345
    assert sum(compaction.values()) < 12345 // 2
    assert "read,bash" in made.argv and "/workspace/s" in made.argv
    with pytest.raises(ConfigError, match="must be one of openai-chat"):
        launch("pi", args={"api": "smtp"})


class Broken(Harness):
    """Can't be installed."""

    name = "broken"
    version = "1"
    recipe = Recipe("npm", ("./no-such-directory",), probe="node_modules/x")

    def launch(self, ctx: LaunchContext) -> Launch:
        return Launch(("x",))


class Hollow(Broken):
    """Installs, but not what it promised."""

    name = "hollow"
    recipe = Recipe("npm", (), probe="node_modules/x")


def test_a_failed_installation_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="no-such-directory"):
        toolchain.ensure(Broken(), tmp_path)
    with pytest.raises(HarnessError, match="hold no node_modules/x"):
        toolchain.ensure(Hollow(), tmp_path)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


def test_toolchains_are_named_by_their_content(tmp_path: Path) -> None:
    paths = {toolchain.path_of(registry.find(name), tmp_path) for name in HEAVY}
    assert len(paths) == len(HEAVY)
    pi = registry.find("pi")
    place = toolchain.path_of(pi, tmp_path)
    assert place.name.startswith("pi-0.73.1-") and place == toolchain.path_of(pi, tmp_path)

    class Newer(type(pi)):  # type: ignore[misc]
        version = "9"
        recipe = Recipe("npm", ("pi@9",), node=(20, 6))

    assert toolchain.path_of(Newer(), tmp_path) != place
    assert toolchain.ensure(registry.find("command"), tmp_path) is None
    assert toolchain.mounts(None) == ()
    place.mkdir(parents=True)
    (place / "polar.json").write_text("{}")
    assert toolchain.ensure(pi, tmp_path) == place
    assert [(m.source, m.target) for m in toolchain.mounts(place)] == [(place, "/polar/harness")]


def test_qwen_code_samples_anew_where_a_stream_broke() -> None:
    """Else it would keep half an answer and ask for the other half, and its history be one that nobody sampled."""
    made = launch("qwen_code")
    settings = json.loads(next(text for path, text in made.files.items() if path.endswith(".qwen/settings.json")))
    told = settings["model"]["generationConfig"]
    assert {500, 502, 503} <= set(told["retryErrorCodes"]) and told["retryInitialDelayMs"] <= 1000


def test_qwen_code_starts_no_agent_of_its_own_when_the_work_is_over() -> None:
    """By itself it has one write down what to remember, where the first answer was the last; HOME is gone then."""
    made = launch("qwen_code")
    settings = json.loads(next(text for path, text in made.files.items() if path.endswith(".qwen/settings.json")))
    assert settings["memory"] == {"enableManagedAutoMemory": False, "enableManagedAutoDream": False}


def test_what_is_known_at_submission_is_what_there_is() -> None:
    assert registry._BUILT_IN.keys() == HARNESSES.keys()
    for name, model in HARNESSES.items():
        assert registry.find(name).known_args == model.model_fields.keys()
    assert set(RUNTIMES) <= set(kinds()) and set(EVALUATORS) <= set(evaluators.names())
