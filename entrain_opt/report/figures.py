"""Plotly figures as plain dictionaries, for a page that holds many variants of few figures.

The page adds what depends on the reader: colours of text and grid (dark or light) and the width. Colours of data are
those of Okabe and Ito, which colour-blind readers can tell apart. Times are rounded to a millionth of the figure's
width, so that a page with thousands of bars stays light.
"""

from __future__ import annotations

from typing import Any

from entrain_opt.report.content import ReportContent
from entrain_opt.report.views import (
    BAR_KINDS,
    BubblesView,
    LoadsView,
    MemoryCurveView,
    MemoryPeakView,
    RatioView,
    TimelineView,
)
from entrain_opt.units import GIB, MIB

Figure = dict[str, Any]

BLUE, SKY, GREEN, ORANGE, VERMILLION = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00"
PINK, YELLOW, GREY, DARK_GREY = "#CC79A7", "#F0E442", "#9AA0A8", "#6B7178"
_DARK_TEXT, _LIGHT_TEXT = "#111111", "#FFFFFF"
#: Fill and text of each kind of bar.
KIND_COLOURS = dict(
    zip(
        BAR_KINDS,
        (
            (SKY, _DARK_TEXT),
            (ORANGE, _DARK_TEXT),
            (GREEN, _DARK_TEXT),
            (PINK, _DARK_TEXT),
            (BLUE, _LIGHT_TEXT),
            (VERMILLION, _DARK_TEXT),
            (YELLOW, _DARK_TEXT),
            (GREY, _DARK_TEXT),
            (DARK_GREY, _LIGHT_TEXT),
        ),
        strict=True,
    )
)
_CAUSE_COLOURS = (GREY, DARK_GREY, VERMILLION, ORANGE, PINK, SKY, BLUE)
_PART_COLOURS = {
    "weights": BLUE,
    "gradients": SKY,
    "optimizer": DARK_GREY,
    "buffers": GREY,
    "activations": ORANGE,
    "messages": PINK,
    "logits": VERMILLION,
}
#: One colour per rank, dark to light, in the order of the pipeline.
_RANK_COLOURS = (BLUE, SKY, GREEN, YELLOW, ORANGE, VERMILLION, PINK, GREY)
_ROW_PIXELS = 34


def all_figures(content: ReportContent) -> dict[str, Figure]:
    """Every figure of a report, by key: its name and, after bars, the choices it depends on."""
    figures: dict[str, Figure] = {}
    for (policy, replica), timeline in content.timelines.items():
        figures[f"timeline|{policy}|{replica}"] = timeline_figure(timeline)
    for (policy, replica), loads in content.loads.items():
        figures[f"loads|{policy}|{replica}"] = loads_figure(loads)
    for policy, bubbles in content.bubbles.items():
        figures[f"bubbles|{policy}"] = bubbles_figure(bubbles)
    figures["memory-peaks"] = memory_peaks_figure(content.memory_peaks)
    for replica, curves in content.memory_curves.items():
        figures[f"memory-curves|{replica}"] = memory_curves_figure(curves)
    if content.ratio is not None:
        figures["ratio"] = ratio_figure(content.ratio)
    return figures


def timeline_figure(view: TimelineView) -> Figure:
    """One row per rank; one trace per kind of work, so that the legend switches them off and on."""
    scale, unit = _time_scale(view.limit_seconds)
    digits = _digits(view.limit_seconds * scale)
    data: list[Figure] = []
    places = {text: place for place, text in enumerate(dict.fromkeys((bar.what, bar.contents) for bar in view.bars))}
    for kind in BAR_KINDS:
        bars = [bar for bar in view.bars if bar.kind == kind]
        if not bars:
            continue
        fill, text = KIND_COLOURS[kind]
        overlaps = kind == "gradient reduction"
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": kind,
                "base": [round(bar.start * scale, digits) for bar in bars],
                "x": [round(bar.seconds * scale, digits) for bar in bars],
                # A reduction runs beside the rank's compute.
                "y": [bar.rank + (0.46 if overlaps else 0.0) for bar in bars],
                "width": 0.12 if overlaps else 0.78,
                "text": [bar.label for bar in bars],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "textfont": {"color": text, "size": 10},
                "marker": {"color": fill, "line": {"width": 0.5, "color": "rgba(0,0,0,0.55)"}},
                # Places in layout.meta, where each text stands once; the page looks them up.
                "customdata": [places[(bar.what, bar.contents)] for bar in bars],
                "hovertemplate": f"<b>{kind}</b><br>%{{customdata}}<br>starts at %{{base:.5~g}}, "
                f"ends at %{{x:.5~g}} {unit}<extra></extra>",
            }
        )
    if view.arrows:
        data.append(_arrow_trace(view, scale, digits))
    rows = len(view.ranks)
    end = round(view.end_seconds * scale, digits)
    layout = _layout(height=_ROW_PIXELS * rows + 130)
    layout |= {
        "barmode": "overlay",
        "uniformtext": {"mode": "hide", "minsize": 8},
        "xaxis": {"title": {"text": f"time, {unit}"}, "range": [0, round(view.limit_seconds * scale * 1.01, digits)]},
        "yaxis": _rank_axis(view.ranks),
        "shapes": [_line(x0=end, x1=end, y0=0, y1=1, yref="paper", dash="dash")],
        "dragmode": "zoom",
        "hovermode": "closest",
        "meta": [f"{what}<br>{contents}" if contents else what for what, contents in places],
    }
    return {"data": data, "layout": layout}


def _arrow_trace(view: TimelineView, scale: float, digits: int) -> Figure:
    x: list[float | None] = []
    y: list[float | None] = []
    for arrow in view.arrows:
        x += [round(arrow.from_seconds * scale, digits), round(arrow.to_seconds * scale, digits), None]
        down = 0.4 if arrow.to_rank > arrow.from_rank else -0.4
        y += [arrow.from_rank + down, arrow.to_rank - down, None]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "deferral: encoder to LLM",
        "x": x,
        "y": y,
        "line": {"color": GREEN, "width": 1.4},
        "marker": {"symbol": "arrow", "angleref": "previous", "size": [0, 9, 0] * len(view.arrows), "color": GREEN},
        "opacity": 0.85,
        "hoverinfo": "skip",
    }


def loads_figure(view: LoadsView) -> Figure:
    """Encoder and LLM bars of every microbatch, above each other; what was deferred in its own colour."""
    scale, unit = _time_scale(view.limit_seconds)
    digits = _digits(view.limit_seconds * scale)
    numbers = list(range(len(view.llm)))
    data: list[Figure] = []
    for axis, name, whole, part, colours in (
        ("y", "encoder", view.encoder, view.encoder_deferred, (SKY, GREEN)),
        ("y2", "LLM", view.llm, view.llm_deferred, (BLUE, PINK)),
    ):
        words = ("its LLM part comes later", "encoded earlier")[axis == "y2"]
        for label, values, colour in (
            (f"{name}", [w - p for w, p in zip(whole, part, strict=True)], colours[0]),
            (f"{name}, {words}", list(part), colours[1]),
        ):
            if label == name or any(values):
                data.append(
                    {
                        "type": "bar",
                        "name": label,
                        "x": numbers,
                        "y": [round(v * scale, digits) for v in values],
                        "yaxis": axis,
                        "marker": {"color": colour},
                        "hovertemplate": f"microbatch %{{x}}: %{{y}} {unit}<extra>{label}</extra>",
                    }
                )
    layout = _layout(height=380)
    top = round(view.limit_seconds * scale * 1.05, digits)
    layout |= {
        "barmode": "stack",
        "bargap": 0.15,
        "xaxis": {
            "title": {"text": "microbatch"},
            "anchor": "y2",
            "tick0": 0,
            "dtick": max(1, round(len(numbers) / 8)),
            "fixedrange": True,
        },
        "yaxis": {"title": {"text": f"encoder, {unit}"}, "domain": [0.55, 1], "range": [0, top], "fixedrange": True},
        "yaxis2": {"title": {"text": f"LLM, {unit}"}, "domain": [0, 0.45], "range": [0, top], "fixedrange": True},
        "shapes": [
            _line(x0=0, x1=1, xref="paper", y0=mean, y1=mean, yref=axis, dash="dot")
            for axis, values in (("y", view.encoder), ("y2", view.llm))
            for mean in (round(sum(values) / max(len(values), 1) * scale, digits),)
        ],
    }
    return {"data": data, "layout": layout}


def bubbles_figure(view: BubblesView) -> Figure:
    """Idle time of each rank, stacked by cause."""
    scale, unit = _time_scale(view.limit_seconds)
    digits = _digits(view.limit_seconds * scale)
    rows = list(range(len(view.ranks)))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": [round(value * scale, digits) for value in values],
            "y": rows,
            "marker": {"color": colour},
            "hovertemplate": f"%{{x}} {unit}: {meaning}<extra>{name}</extra>",
        }
        for (name, meaning, values), colour in zip(view.causes, _CAUSE_COLOURS, strict=True)
        if max(values) > 1e-6 * view.limit_seconds
    ]
    layout = _layout(height=30 * len(rows) + 150)
    layout |= {
        "barmode": "stack",
        "xaxis": {
            "title": {"text": f"waiting, {unit}"},
            "range": [0, round(view.limit_seconds * scale * 1.02, digits)],
            "fixedrange": True,
        },
        "yaxis": _rank_axis(view.ranks),
    }
    return {"data": data, "layout": layout}


def memory_peaks_figure(view: MemoryPeakView) -> Figure:
    """Peak of each rank, stacked by what makes it up, with the limit."""
    size, unit = _byte_scale(view.limit_bytes)
    rows = list(range(len(view.ranks)))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": [round(value / size, 3) for value in values],
            "y": rows,
            "marker": {"color": _PART_COLOURS[name]},
            "hovertemplate": f"%{{x}} {unit}<extra>{name}</extra>",
        }
        for name, values in view.parts
    ]
    limit = round(view.limit_bytes / size, 3)
    largest = max(sum(values) for values in zip(*(values for _, values in view.parts), strict=True)) / size
    layout = _layout(height=30 * len(rows) + 150)
    # A limit far away would press the bars into a sliver; it is named in the caption then.
    near = largest > 0.2 * limit
    layout |= {
        "barmode": "stack",
        "xaxis": {
            "title": {"text": unit},
            "range": [0, round(1.04 * max(limit if near else 0.0, largest), 3)],
            "fixedrange": True,
        },
        "yaxis": _rank_axis(view.ranks),
        "shapes": [_line(x0=limit, x1=limit, y0=0, y1=1, yref="paper", dash="dash")] if near else [],
    }
    return {"data": data, "layout": layout}


def memory_curves_figure(view: MemoryCurveView) -> Figure:
    """Bytes of each rank over time, as steps, with the limit."""
    size, unit = _byte_scale(view.limit_bytes)
    scale, time_unit = _time_scale(view.end_seconds)
    digits = _digits(view.end_seconds * scale)
    largest = max(max(values) for values in view.num_bytes) / size
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [round(value * scale, digits) for value in seconds],
            "y": [round(value / size, 3) for value in num_bytes],
            "line": {
                "shape": "hv",
                "width": 1.6,
                "color": _RANK_COLOURS[rank % len(_RANK_COLOURS)],
                "dash": ("solid", "dot", "dash")[rank // len(_RANK_COLOURS) % 3],
            },
            "hovertemplate": f"%{{y}} {unit} at %{{x}} {time_unit}<extra>{name}</extra>",
        }
        for rank, (name, seconds, num_bytes) in enumerate(zip(view.ranks, view.seconds, view.num_bytes, strict=True))
    ]
    limit = round(view.limit_bytes / size, 3)
    near = largest > 0.2 * limit
    layout = _layout(height=400)
    layout |= {
        "xaxis": {"title": {"text": f"time, {time_unit}"}, "range": [0, round(view.end_seconds * scale, digits)]},
        "yaxis": {
            "title": {"text": unit},
            "range": [0, round(1.06 * max(limit if near else 0.0, largest), 3)],
            "fixedrange": True,
        },
        "shapes": [_line(x0=0, x1=1, xref="paper", y0=limit, y1=limit, dash="dash")] if near else [],
    }
    return {"data": data, "layout": layout}


def ratio_figure(view: RatioView) -> Figure:
    """Encoder : LLM work of random batches narrows as they grow."""
    sizes = list(view.sizes)

    def line(name: str, values: tuple[float, ...], **extra: Any) -> Figure:
        return {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": sizes,
            "y": [float(f"{value:.5g}") for value in values],
            "hovertemplate": f"batches of %{{x}}: %{{y:.3g}}<extra>{name}</extra>",
            **extra,
        }

    data = [
        line("lowest", view.lowest, line={"width": 0}, showlegend=False),
        line(
            f"all {view.trials} batches",
            view.highest,
            fill="tonexty",
            fillcolor="rgba(86,180,233,0.25)",
            line={"width": 0},
        ),
        line("5 %", view.low, line={"width": 0}, showlegend=False),
        line("nine in ten", view.high, fill="tonexty", fillcolor="rgba(86,180,233,0.45)", line={"width": 0}),
        line("median", view.median, mode="lines+markers", line={"color": BLUE, "width": 2}),
    ]
    overall = float(f"{view.all_data:.5g}")
    layout = _layout(height=340)
    top = max(view.high[min(3, len(sizes) - 1)], 2 * view.all_data)
    layout |= {
        "xaxis": {"title": {"text": "samples per global batch"}, "type": "log", "dtick": 0.30103, "fixedrange": True,
                  "tickvals": sizes, "ticktext": [str(s) if i % 2 == 0 else "" for i, s in enumerate(sizes)]},
        "yaxis": {"title": {"text": "encoder work / LLM work"}, "range": [0, float(f"{top:.4g}")], "fixedrange": True},
        "shapes": [
            _line(x0=0, x1=1, xref="paper", y0=overall, y1=overall, dash="dot"),
            _line(x0=view.global_batch_size, x1=view.global_batch_size, y0=0, y1=1, yref="paper", dash="dash"),
        ],
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _layout(*, height: int) -> Figure:
    return {
        "height": height,
        "margin": {"l": 10, "r": 12, "t": 10, "b": 10},
        "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "traceorder": "normal"},
        "hoverlabel": {"align": "left"},
        "font": {"size": 13},
    }


def _rank_axis(ranks: tuple[str, ...]) -> Figure:
    return {
        "tickvals": list(range(len(ranks))),
        "ticktext": list(ranks),
        "range": [len(ranks) - 0.4, -0.6],
        "fixedrange": True,
        "automargin": True,
        "zeroline": False,
        "showgrid": False,
        # Ticks that nobody sees keep the names off the axis.
        "ticks": "outside",
        "ticklen": 5,
        "tickcolor": "rgba(0,0,0,0)",
    }


def _line(*, dash: str, **place: Any) -> Figure:
    return {"type": "line", "line": {"dash": dash, "width": 1.5}, **place}


def _time_scale(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 2 else (1e3, "ms")


def _byte_scale(num_bytes: float) -> tuple[float, str]:
    return (float(GIB), "GiB") if num_bytes >= 2 * GIB else (float(MIB), "MiB")


def _digits(largest: float) -> int:
    """Decimals that resolve a millionth."""
    digits = 6
    while largest >= 10 and digits > 0:
        largest, digits = largest / 10, digits - 1
    return digits
