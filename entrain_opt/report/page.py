"""One HTML file from the content of a report: plotly.js inlined once, and a policy that forbids any network.

Nothing is computed here. Price: plotly.js is most of the file (`write_page` says how much).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from entrain_opt.report.assets import CSS, EARLY_SCRIPT, SCRIPT
from entrain_opt.report.content import ReportContent
from entrain_opt.report.figures import all_figures
from entrain_opt.report.views import TableView, Tile

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)
_ZOOM = (
    ("left", "\u2190", "Earlier"),
    ("right", "\u2192", "Later"),
    ("in", "+", "Zoom in"),
    ("out", "\u2212", "Zoom out"),
)


def write_page(content: ReportContent, path: str | Path) -> tuple[int, int]:
    """Write the page, whole or not at all.

    Returns:
        Bytes of the file, and of plotly.js in it.
    """
    from plotly.offline import get_plotlyjs

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    plotly_js = get_plotlyjs()
    data = page_html(content, plotly_js).encode("utf-8")
    scratch = path.with_name(path.name + ".partial")
    scratch.write_bytes(data)
    scratch.replace(path)
    return len(data), len(plotly_js.encode("utf-8"))


def page_html(content: ReportContent, plotly_js: str) -> str:
    """The page as text."""
    sections = (
        ("plan", "The plan and why it won", _plan(content)),
        ("timeline", "One iteration, rank by rank", _timeline(content)),
        ("loads", "Load of each microbatch", _loads(content)),
        ("waiting", "Why ranks wait", _bubbles(content)),
        ("memory", "Memory", _memory(content)),
        ("stability", "How large a batch keeps this plan right", _stability(content)),
        ("what-if", "What if", _table(content.what_if) + _table(content.counts)),
    )
    shown = [(key, title, body) for key, title, body in sections if body]
    links = "".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, title, _ in shown)
    body = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{escape(title)}</h2>{body}</section>\n'
        for key, title, body in shown
    )
    footer = "".join(f"<p>{escape(line)}</p>" for line in content.footer)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(content.title)}: entrain report</title>
<style>{CSS}</style>
<script>{EARLY_SCRIPT}</script>
</head>
<body>
<a class="skip" href="#plan">Skip to the plan</a>
<header class="top"><div><h1>{escape(content.title)}</h1><p class="soft">{escape(content.subtitle)}</p></div>
<button id="theme" type="button">Theme</button></header>
<main>
<p class="lead" id="headline">{escape(content.sentence)}</p>
<dl class="tiles">{"".join(map(_tile, content.tiles))}</dl>
<nav aria-label="Sections"><ul>{links}</ul></nav>
{body}<footer>{footer}</footer>
</main>
<script type="application/json" id="figures">{_json(all_figures(content))}</script>
<script type="application/json" id="summaries">{_json(_summaries(content))}</script>
<script>{_script(plotly_js)}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _summaries(content: ReportContent) -> dict[str, str]:
    """What each figure says in words, by the key of the figure."""
    said = {f"timeline|{policy}|{replica}": view.summary for (policy, replica), view in content.timelines.items()}
    said |= {f"loads|{policy}|{replica}": view.summary for (policy, replica), view in content.loads.items()}
    said |= {f"bubbles|{policy}": view.summary for policy, view in content.bubbles.items()}
    said |= {f"memory-curves|{replica}": view.summary for replica, view in content.memory_curves.items()}
    said["memory-peaks"] = content.memory_peaks.summary
    if content.ratio is not None:
        said["ratio"] = content.ratio.summary
    return said


def _plan(content: ReportContent) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in content.plan_lines)
    candidates = _table(content.candidates) if content.candidates is not None else ""
    return f'{_table(content.stages)}<ul class="lines">{lines}</ul>{candidates}'


def _timeline(content: ReportContent) -> str:
    policy = _choice("policy", "Assigner", content.policies, [_policy_name(content, p) for p in content.policies])
    zoom = "".join(
        f'<button type="button" data-zoom="{step}" data-plot="timeline-plot" aria-label="{name}" title="{name}">{sign}'
        "</button>"
        for step, sign, name in _ZOOM
    )
    zoom += '<button type="button" data-zoom="all" data-plot="timeline-plot">Whole iteration</button>'
    return (
        f'<div class="controls">{policy}{_replicas(content)}<span class="group" role="group" aria-label="Zoom">{zoom}'
        "</span></div>"
        + _figure("timeline-plot", "timeline|{policy}|{replica}", "Timeline of the pipeline")
        + '<p class="soft">Numbers are microbatches. Drag to zoom, double-click for everything, hover for details; a '
        f"click in the legend hides a kind. The dashed line is the end of the step. {escape(content.replicas_note)}</p>"
    )


def _loads(content: ReportContent) -> str:
    panels = "".join(
        f"<div><h3>{escape(_policy_name(content, policy))}</h3>"
        + _figure(f"loads-{index}", f"loads|{policy}|{{replica}}", f"Load of each microbatch under {policy}")
        + "</div>"
        for index, policy in reversed(list(enumerate(content.policies)))
    )
    return (
        f'<div class="controls">{_replicas(content)}</div><p class="soft">Seconds of forward and backward that each '
        f'microbatch asks of a stage; dotted: the mean. Even bars keep stages busy.</p><div class="pair">{panels}</div>'
    )


def _bubbles(content: ReportContent) -> str:
    panels = "".join(
        f"<div><h3>{escape(_policy_name(content, policy))}</h3>"
        + _figure(f"bubbles-{index}", f"bubbles|{policy}", f"Waiting by cause under {policy}")
        + "</div>"
        for index, policy in reversed(list(enumerate(content.policies)))
    )
    return f'<div class="pair">{panels}</div>'


def _memory(content: ReportContent) -> str:
    return (
        f'<div class="controls">{_replicas(content)}</div><div class="pair"><div><h3>At the peak</h3>'
        + _figure("memory-peaks", "memory-peaks", "Peak memory of each rank by content")
        + "</div><div><h3>Over time</h3>"
        + _figure("memory-curves", "memory-curves|{replica}", "Memory of each rank over time")
        + '</div></div><p class="soft">Dashed: what a rank may use (not drawn where it is more than five times as much'
        ").</p>"
    )


def _stability(content: ReportContent) -> str:
    if content.ratio is None:
        return ""
    text = "Dashed: this plan's global batch. Dotted: the whole data."
    return (
        f"<p>{escape(content.ratio.sentence)}</p>"
        + _figure("ratio", "ratio", "Encoder to LLM work by batch size")
        + f'<p class="soft">{text}</p>'
    )


def _figure(name: str, key: str, title: str) -> str:
    return (
        f'<figure aria-labelledby="{name}-name" aria-describedby="{name}-note"><div class="plot" id="{name}" '
        f'role="img" aria-label="{escape(title)}" aria-describedby="{name}-note" data-key="{escape(key)}" '
        f'data-note="{name}-note"></div><ul class="key" hidden></ul>'
        f'<figcaption><span id="{name}-name">{escape(title)}.</span> '
        f'<span id="{name}-note" aria-live="polite"></span></figcaption></figure>'
    )


def _replicas(content: ReportContent) -> str:
    names = [f"{replica}{' (slowest)' if i == 0 else ''}" for i, replica in enumerate(content.replicas)]
    return _choice("replica", "Replica", [str(replica) for replica in content.replicas], names)


def _policy_name(content: ReportContent, policy: str) -> str:
    return f"{policy} ({'this plan' if policy == content.policies[0] else 'for comparison'})"


def _choice(name: str, label: str, values: Sequence[str], names: Sequence[str]) -> str:
    options = "".join(
        f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in zip(values, names, strict=True)
    )
    hidden = " hidden" if len(values) == 1 else ""
    return f'<label{hidden}>{label} <select data-choice="{name}">{options}</select></label>'


def _tile(tile: Tile) -> str:
    return (
        f'<div class="tile"><dt>{escape(tile.name)}</dt><dd><div class="value">{escape(tile.value)}</div>'
        f'<div class="note">{escape(tile.note)}</div></dd></div>'
    )


def _table(table: TableView) -> str:
    """A table that scrolls within itself, also with the keyboard."""
    head = "".join(f'<th scope="col"{_class(table, i, "")}>{escape(name)}</th>' for i, name in enumerate(table.columns))
    rows = []
    for index, cells in enumerate(table.rows):
        kind = "marked" if index == table.marked else "faint" if index in table.faint else ""
        rows.append(
            f"<tr{f' class={kind}' if kind else ''}>"
            + "".join(f"<td{_class(table, i, cell)}>{escape(cell)}</td>" for i, cell in enumerate(cells))
            + "</tr>"
        )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.caption)}"><table><caption>'
        f"{escape(table.caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _class(table: TableView, column: int, cell: str) -> str:
    names = ["text"] if column in table.text_columns else []
    names += ["long"] if len(cell) > 48 else []
    return f' class="{" ".join(names)}"' if names else ""


def _json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _script(source: str) -> str:
    """A script's text, so that no `</script` inside a string ends it."""
    return source.replace("</script", "<\\/script")
