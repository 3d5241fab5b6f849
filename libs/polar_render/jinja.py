"""Chat templates: compiled once, in a sandbox, with the extras that published templates rely on.

Templates come with models, that is, from strangers: they run in jinja2's immutable sandbox and see values only. Our own
are trusted, which makes a short rendering twice as fast.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from polar_common.errors import ConfigError, RenderError

from .messages import Json

__all__ = ["Template", "TemplateValue", "compile_template"]

# What jinja hands around; the module's one border with untyped values.
TemplateValue = Any


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for trainers; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _to_json(
    value: TemplateValue,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise RenderError(str(message))


class Template:
    """A compiled chat template."""

    def __init__(self, compiled: jinja2.Template) -> None:
        self._compiled = compiled

    def __call__(
        self,
        messages: list[dict[str, TemplateValue]],
        tools: list[dict[str, TemplateValue]] | None,
        args: dict[str, TemplateValue],
        *,
        generate: bool,
    ) -> str:
        """The rendered text. Raises RenderError where the template refuses or can't cope."""
        try:
            return self._compiled.render(
                {"documents": None, **args, "messages": messages, "tools": tools, "add_generation_prompt": generate}
            )
        except RenderError:
            raise
        except (jinja2.TemplateError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise RenderError(f"the chat template failed: {error}") from error


def compile_template(
    source: str,
    names: dict[str, Json],
    *,
    trusted: bool = False,
    now: Callable[[], datetime.datetime] = datetime.datetime.now,
) -> Template:
    """Compiles a template. `names` are what it may refer to beside messages and tools (`bos_token`, …).

    `trusted` is for templates of this package alone.

    Raises ConfigError if it isn't valid.
    """
    kind = jinja2.Environment if trusted else jinja2.sandbox.ImmutableSandboxedEnvironment
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    environment.globals.update(names)
    try:
        return Template(environment.from_string(source))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"line {error.lineno}: {error.message}", "chat template") from error
