"""A picture of the assigner's benchmark: every policy's iteration times, a dot per trace and the geometric mean.

Needs chromium with chromedriver, and selenium, as `docs/make_pictures.py` does.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from assigner import Result

DOCS = Path(__file__).parents[1] / "docs"
WIDTH, ROW_PIXELS, MARGIN_PIXELS = 1200, 34, 120
#: Of the project's own policies and of the others.
OWN_COLOUR, OTHER_COLOUR = "#1f6feb", "#8c959f"
OWN = ("auto", "exact", "joint")
_PAGE = """<!doctype html><meta charset="utf-8"><style>body {{ margin:0; padding:10px; background:#fff; width:{width}px;
box-sizing:border-box; }}</style><body><div id="plot"></div><script>{plotly}</script><script>
const figure = {figure}; Plotly.newPlot("plot", figure.data, figure.layout, {{ staticPlot: true }});</script>"""


def plot_results(results: list[Result], picture: Path) -> None:
    """Write the picture."""
    from plotly.offline import get_plotlyjs

    sys.path.insert(0, str(DOCS))
    from make_pictures import photograph, start_browser

    figure = json.dumps(make_figure(results)).replace("<", "\\u003c")
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "assigner.html"
        page.write_text(_PAGE.format(width=WIDTH, plotly=get_plotlyjs(), figure=figure), encoding="utf-8")
        browser = start_browser(Path(scratch) / "profile")
        height = "document.body.getBoundingClientRect().bottom"
        photograph(browser, page, picture, width=WIDTH, height=height, scale=1.25)
        browser.quit()


def make_figure(results: list[Result]) -> dict[str, Any]:
    """Two panels, trained and frozen encoder; policies from the fastest (over both) to the slowest."""
    from assigner import geometric_mean

    names = {result.contender: None for result in results}
    order = sorted(names, key=lambda name: -geometric_mean(r.over_balanced for r in results if r.contender == name))
    data: list[dict[str, Any]] = []
    means: dict[tuple[str, str], str] = {}
    for axis, trained in (("", True), ("2", False)):
        for name in order:
            mine = [r for r in results if r.contender == name and r.trained == trained]
            sources = {r.source: None for r in mine}
            dots = [geometric_mean(r.over_balanced for r in mine if r.source == source) for source in sources]
            mean = geometric_mean(r.over_balanced for r in mine)
            if not np.isfinite(mean):
                continue
            colour = OWN_COLOUR if name.split(",")[0] in OWN else OTHER_COLOUR
            common = {"xaxis": f"x{axis}", "yaxis": "y", "showlegend": False, "cliponaxis": False}
            marker = {"color": colour, "size": 8, "opacity": 0.35}
            data.append({**common, "x": dots, "y": [name] * len(dots), "mode": "markers", "marker": marker})
            tick = {"color": colour, "size": 10, "symbol": "line-ns", "line": {"width": 4, "color": colour}}
            data.append({**common, "x": [mean], "y": [name], "mode": "markers", "marker": tick})
            means[axis, name] = f"<b>{mean:.2f}</b>"
    titles = (("x", "Trained encoder"), ("x2", "Frozen encoder"))
    layout: dict[str, Any] = {
        "width": WIDTH - 20,
        "height": ROW_PIXELS * len(order) + MARGIN_PIXELS,
        "margin": {"l": 190, "r": 20, "t": 50, "b": 60},
        "font": {"family": 'system-ui,"DejaVu Sans",sans-serif', "size": 15, "color": "#1b1f24"},
        "plot_bgcolor": "#fff",
        "yaxis": {"categoryarray": order, "categoryorder": "array", "gridcolor": "#eaeef2"},
        "annotations": [
            {"text": f"<b>{title}</b>", "xref": f"{axis} domain", "yref": "paper", "x": 0, "y": 1.0, "yshift": 34,
             "showarrow": False, "xanchor": "left"}
            for axis, title in titles
        ]
        + [
            {"text": text, "xref": f"x{axis} domain", "yref": "y", "x": 1.0, "y": name, "showarrow": False,
             "xanchor": "right", "font": {"size": 14}}
            for (axis, name), text in means.items()
        ],
        "shapes": [
            {"type": "line", "xref": axis, "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1,
             "line": {"color": "#57606a", "dash": "dot", "width": 1.5}}
            for axis, _ in titles
        ],
    }  # fmt: skip
    # The means stand in a column of their own, right of every dot.
    ends = [value for trace in data for value in trace["x"] if np.isfinite(value)]
    span = max(ends) - min(ends)
    for axis, domain in (("xaxis", [0.0, 0.48]), ("xaxis2", [0.52, 1.0])):
        layout[axis] = {
            "domain": domain,
            "range": [min(ends) - 0.05 * span, max(ends) + 0.14 * span],
            "gridcolor": "#eaeef2",
            "zeroline": False,
            "title": {
                "text": "iteration time over evenly loaded 1F1B; a dot is a trace, bold the geometric mean",
                "font": {"size": 12},
            },
        }
    return {"data": data, "layout": layout}
