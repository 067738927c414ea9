"""Make the README's pictures from the recipes: `python docs/make_pictures.py` in the folder that holds `recipes/`.

Needs chromium with chromedriver, and selenium. `quickstart` measures this machine, so its times differ from machine to
machine; the 64-device recipe is analytic and gives the same picture everywhere.

- report-<name>.png: top of the report.
- timeline.png (quickstart), timeline-64gpu.png: one iteration with samples in order, and under the plan's policy, on
  one time axis.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from entrain_opt.cli.plan import resolve_recipe
from entrain_opt.cli.recipe import read_recipe
from entrain_opt.cli.simulate import default_schedules, make_bench
from entrain_opt.report.bench import Bench
from entrain_opt.report.content import BASELINE, build_content, typical_batch
from entrain_opt.report.figures import timeline_figure
from entrain_opt.report.page import write_page
from entrain_opt.report.timelines import timeline_view
from entrain_opt.units import format_seconds

DOCS = Path(__file__).parent
RECIPES = {"quickstart": "recipes/quickstart.yaml", "64gpu": "recipes/qwen2_5-vl-3b-64gpu.yaml"}
TIMELINES = {"quickstart": "timeline.png", "64gpu": "timeline-64gpu.png"}
_PAGE = """<!doctype html><meta charset="utf-8"><style>body {{ margin:0; padding:14px 18px 4px; background:#fff;
font:17px system-ui,"DejaVu Sans",sans-serif; color:#1b1f24; width:{width}px; box-sizing:border-box; }}
h2 {{ font-size:19px; margin:6px 0 0; }}</style><body><div id="panels"></div><script>{plotly}</script><script>
for (const [title, figure] of {panels}) {{
  const heading = document.createElement("h2"), plot = document.createElement("div");
  heading.textContent = title; document.getElementById("panels").append(heading, plot);
  Plotly.newPlot(plot, figure.data, figure.layout, {{ staticPlot: true }});
}}</script>"""


def main() -> None:
    """Make all pictures, or those of the recipes named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*RECIPES, []], help="quickstart, 64gpu (default: both)")
    parser.add_argument("--cache-dir", default="runs/cache")
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        browser = start_browser(Path(scratch) / "profile")
        for name in arguments.names or RECIPES:
            recipe = read_recipe(RECIPES[name])
            found = resolve_recipe(recipe, cache_dir=arguments.cache_dir, console=console)
            seed = recipe.options.seed
            bench = make_bench(found, recipe, num_batches=3, seed=seed)
            content = build_content(
                bench,
                found.samples,
                name=recipe.name,
                policies=(),
                schedules=default_schedules(found.plan),
                seed=seed,
                progress=lambda text: console.print(text),
            )
            console.print(content.sentence, soft_wrap=True)
            report = Path(scratch) / f"{name}.html"
            write_page(content, report)
            bottom = "document.getElementById('timeline').getBoundingClientRect().bottom + scrollY + 16"
            photograph(browser, report, DOCS / f"report-{name}.png", width=1280, height=bottom, scale=1.0)
            timelines = Path(scratch) / f"{name}-timeline.html"
            timelines.write_text(timeline_page(bench, width=1600), encoding="utf-8")
            height = "document.body.getBoundingClientRect().bottom"
            photograph(browser, timelines, DOCS / TIMELINES[name], width=1600, height=height, scale=1.25)
        browser.quit()


def timeline_page(bench: Bench, *, width: int) -> str:
    """Both policies' slowest replica of the report's batch, above each other on one axis."""
    from plotly.offline import get_plotlyjs

    plan, names = bench.plan, [BASELINE, bench.plan.policy]
    trials = [bench.trial(name, plan.schedule) for name in names]
    batch = typical_batch(bench, trials[-1])
    timelines = [
        bench.timeline(batch, trial.policy, trial.schedule, trial.num_microbatches, cap_bytes=trial.cap_bytes)
        for trial in trials
    ]
    limit = max(timeline.makespan_seconds for timeline in timelines)
    panels: list[tuple[str, dict[str, Any]]] = []
    for name, timeline in zip(names, timelines, strict=True):
        ends = [run.times.makespan_seconds for run in timeline.runs]
        replica = max(range(len(ends)), key=ends.__getitem__)
        figure = timeline_figure(timeline_view(timeline, bench.batches[batch], plan, replica, limit_seconds=limit))
        last = name == names[-1]
        figure["layout"] |= {"width": width - 36, "font": {"size": 15, "color": "#1b1f24"}, "showlegend": last}
        # Fixed margins, so that both panels have rows of one height; the legend stands below the second.
        rows, below = max(38 * plan.degrees.pipeline, 110), 110 if last else 32
        figure["layout"] |= {"height": rows + below + 6, "margin": {"l": 190, "r": 14, "t": 6, "b": below}}
        figure["layout"]["legend"] |= {"y": -44 / rows, "yanchor": "top"}
        figure["layout"]["xaxis"]["title"] = {
            "text": figure["layout"]["xaxis"]["title"]["text"] if last else "",
            "standoff": 4,
        }
        figure["layout"]["yaxis"]["automargin"] = False
        which = f", slowest of {len(ends)} replicas" if len(ends) > 1 else ""
        title = "Samples in order" if name == BASELINE else f"Balanced by entrain ({name})"
        panels.append(
            (
                f"{title}: {format_seconds(timeline.makespan_seconds)} per step, devices wait "
                f"{timeline.bubble_share:.0%} of the pipeline's time{which}",
                figure,
            )
        )
    return _PAGE.format(width=width, plotly=get_plotlyjs(), panels=json.dumps(panels).replace("<", "\\u003c"))


def start_browser(profile: Path) -> Any:
    """A headless chromium."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", f"--user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def photograph(browser: Any, page: Path, picture: Path, *, width: int, height: str, scale: float) -> None:
    """A picture of a page's top; `height` is an expression in the page."""
    from selenium.webdriver.support.ui import WebDriverWait

    def resize(pixels: int) -> None:
        metrics = {"width": width, "height": pixels, "deviceScaleFactor": scale, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    resize(900)
    browser.get(page.as_uri())
    WebDriverWait(browser, 60).until(lambda b: b.execute_script("return !!document.querySelector('.main-svg')"))
    resize(int(browser.execute_script(f"return Math.ceil({height})")))
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    browser.save_screenshot(str(picture))
    print(f"{picture}: {picture.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
