"""The page as text: one HTML file whose scripts and styles are inside it, and allowed by their hashes only."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

from inrun.errors import InrunError
from inrun.report.about import PAPER, citation, drop_command, facts, next_commands
from inrun.report.findings import Findings
from inrun.report.panels import PANELS
from inrun.report.payload import payload
from inrun.report.story import account_rows, headlines, notices, remarks, run_line, stories
from inrun.report.text import one_line, safe_json, visible

#: In the order they run: tools, then the panels' own scripts, then what shows them all.
TOOLS, REST = ("both.js", "kit.js", "export.js", "charts.js", "tables.js"), ("sample.js", "samples.js", "main.js")
#: Plotly makes an empty style element and fills it rule by rule: the hash of nothing lets it.
NOTHING = ""


class ReportError(InrunError):
    """The report cannot be built."""


def render(found: Findings, title: str | None = None) -> str:
    """Return the whole page. The same findings give the same characters: it holds no time and no random number."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        raise ReportError("the report needs jinja2: pip install 'inrun[report]'") from None
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    style = _asset("style.css")
    scripts = [_inline(s) for s in (_asset("early.js"), _plotly(), _app())]
    early, plotly, app = scripts
    trusted = {"early": early, "plotly": plotly, "app": app, "style": style, "data": safe_json(payload(found))}
    name = title if title is not None else found.path.rstrip("/").rpartition("/")[2]
    return environment.from_string(_asset("page.html")).render(
        csp=content_security_policy(scripts, [style]),
        title=one_line(name, 120),
        **{name: Markup(text) for name, text in trusted.items()},  # noqa: S704 - our own files, and JSON made safe
        found=found,
        sets=[one_line(s, 60) for s in found.sets],
        columns=[one_line(c, 60) for c in found.columns],
        panels=[panel for panel in PANELS if panel.id in found.panels],
        account_rows=account_rows,
        remarks=remarks,
        stories=stories(found),
        headlines=headlines(found),
        notices=notices(found),
        run_line=run_line(found),
        facts=facts(found.about),
        paper=PAPER,
        software=citation(found.about),
        drops=_drops(found),
        commands=[(visible(c, 1000), what) for c, what in next_commands(found.path, found.columns, list(found.sets))],
    )


def _drops(found: Findings) -> list[tuple[str, str]]:
    """Return the command that drops samples, one per validation set; none where nothing was registered to write."""
    if not found.distributions or not found.samples_registered:
        return []
    commands = (drop_command(found.path, name, len(found.sets), folds) for name, folds in found.sets.items())
    return [(visible(command, 1000), what) for command, what in commands]


def content_security_policy(scripts: list[str], styles: list[str]) -> str:
    """Return a policy that lets exactly these inline texts run, and nothing be fetched."""
    script = " ".join(_hash(s) for s in scripts)
    style = " ".join(_hash(s) for s in [*styles, NOTHING])
    rules = {
        "default-src": "'none'",
        "script-src": script,
        "style-src": style,
        "img-src": "data:",
        "connect-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inline(script: str) -> str:
    """Return a script that can stand in a script element; in JavaScript strings and patterns the added backslash is nothing."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _app() -> str:
    """Return the page's own script; each panel's part has a scope of its own, so that their names cannot clash."""
    panels = ["{\n" + _asset(f"panels/{panel.id}.js") + "}\n" for panel in PANELS]
    return "\n".join([*map(_asset, TOOLS), *panels, *map(_asset, REST)])


@cache
def _asset(name: str) -> str:
    text = (files("inrun.report") / "assets" / name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")  # as an HTML parser does before a browser takes the hash


@cache
def _plotly() -> str:
    """Return plotly.js from the installed package, which carries it."""
    try:
        source: Any = files("plotly") / "package_data" / "plotly.min.js"
        return str(source.read_text(encoding="utf-8")).replace("\r\n", "\n")
    except (ImportError, OSError):
        raise ReportError("the report draws with plotly: pip install 'inrun[report]'") from None
