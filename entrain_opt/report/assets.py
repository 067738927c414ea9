"""Style sheet and script of the page. Both are small and written out, because the page may load nothing."""

CSS = """
:root { color-scheme: light dark; }
:root, [data-theme=light] { --page:#f6f7f9; --card:#ffffff; --text:#1b1f24; --soft:#57606a; --line:#d5dae0;
  --grid:#e3e7ec;
  --accent:#005a9c; --mark:#e3f1fb; --zero:#aab2bb; }
@media (prefers-color-scheme: dark) { :root:not([data-theme=light]) { --page:#0f1318; --card:#171c23; --text:#e8ecf1;
  --soft:#a3adb9; --line:#323a45; --grid:#2a313b; --accent:#7cc4f5; --mark:#17324a; --zero:#566170; } }
:root[data-theme=dark] { --page:#0f1318; --card:#171c23; --text:#e8ecf1; --soft:#a3adb9; --line:#323a45; --grid:#2a313b;
  --accent:#7cc4f5; --mark:#17324a; --zero:#566170; }
:root[data-theme=dark] { color-scheme: dark; } :root[data-theme=light] { color-scheme: light; }
* { box-sizing: border-box; } [hidden] { display:none !important; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body { margin:0; background:var(--page); color:var(--text); font:16px/1.55 system-ui,"Segoe UI",Roboto,"Helvetica Neue",
  Arial,sans-serif; overflow-wrap:anywhere; }
main, header.top { max-width:1320px; margin:0 auto; padding:0 16px; }
header.top { display:flex; gap:16px; align-items:flex-start; justify-content:space-between; padding-top:24px; }
h1 { font-size:1.6rem; line-height:1.2; margin:0; } h2 { font-size:1.2rem; margin:0 0 8px; } h3 { font-size:1rem;
  margin:0; }
p { margin:0 0 10px; max-width:90ch; } .soft { color:var(--soft); } .lead { font-size:1.1rem; margin:14px 0 18px; }
a { color:var(--accent); }
nav { margin:0 0 18px; } nav ul { display:flex; flex-wrap:wrap; gap:4px 16px; padding:0; margin:0; list-style:none; }
section { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:18px; margin:0 0 18px;
  min-width:0; scroll-margin-top:12px; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,165px),1fr)); gap:10px; margin:0 0 18px;
  padding:0; }
.tile { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:12px 14px; }
.tile dt { color:var(--soft); font-size:.85rem; } .tile dd { margin:0; }
.tile .value { font-size:1.5rem; font-weight:650; line-height:1.25; } .tile .note { color:var(--soft);
  font-size:.85rem; }
.pair { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr)); gap:18px; }
.pair > * { min-width:0; }
figure { margin:8px 0 0; min-width:0; } figcaption { color:var(--soft); font-size:.92rem; margin-top:6px;
  max-width:100ch; }
.plot { width:100%; min-width:0; }
.key { display:flex; flex-wrap:wrap; gap:2px 14px; list-style:none; padding:0; margin:4px 0; font-size:.82rem; }
.key span { display:inline-block; width:12px; height:12px; border-radius:2px; margin-right:6px; }
.scroll { overflow-x:auto; max-width:100%; margin:8px 0 14px; border:1px solid var(--line); border-radius:8px; }
table { border-collapse:collapse; width:100%; font-size:.9rem; font-variant-numeric:tabular-nums;
  overflow-wrap:normal; }
caption { text-align:left; color:var(--soft); padding:8px 10px; font-size:.9rem; }
th, td { padding:6px 10px; border-top:1px solid var(--line); text-align:right; white-space:nowrap; vertical-align:top; }
th { color:var(--soft); font-weight:600; white-space:normal; vertical-align:bottom; } th.text,
  td.text { text-align:left; }
td.long { white-space:normal; min-width:240px; }
tr.marked td { background:var(--mark); font-weight:600; } tr.faint td { color:var(--soft); }
ul.lines { margin:0 0 12px; padding-left:20px; max-width:110ch; }
button, select { font:inherit; color:var(--text); background:var(--card); border:1px solid var(--line);
  border-radius:7px;
  padding:5px 10px; min-height:36px; cursor:pointer; }
button:hover, select:hover { border-color:var(--accent); }
:focus-visible { outline:3px solid var(--accent); outline-offset:2px; border-radius:4px; }
#theme { white-space:nowrap; flex-shrink:0; }
.controls { display:flex; flex-wrap:wrap; gap:8px 14px; align-items:center; margin:4px 0; }
.controls label { display:inline-flex; gap:8px; align-items:center; color:var(--soft); }
.controls .group { display:inline-flex; gap:6px; }
.skip { position:absolute; left:-9999px; } .skip:focus { left:8px; top:8px; background:var(--card); padding:8px;
  z-index:9; }
footer { color:var(--soft); font-size:.88rem; padding:0 0 32px; }
@media (max-width:600px) { section { padding:12px; border-radius:8px; } header.top { padding-top:14px; }
  h1 { font-size:1.3rem; } .lead { font-size:1rem; } .tile .value { font-size:1.2rem; }
  .tiles { grid-template-columns:repeat(2,minmax(0,1fr)); } td.long { min-width:200px; } }
@media print { .controls, nav, #theme { display:none; } section { break-inside:avoid; } }
"""

#: In the head, before anything is drawn: the theme that the reader chose last.
EARLY_SCRIPT = """
try { const kept = localStorage.getItem("entrain-theme"); if (kept) document.documentElement.dataset.theme = kept; }
catch (error) { /* A browser may forbid storage; the system's theme is used then. */ }
"""

SCRIPT = """
"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const summaries = JSON.parse(document.getElementById("summaries").textContent);
const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
const plots = [...document.querySelectorAll(".plot")];
const choice = name => document.querySelector(`select[data-choice="${name}"]`).value;
const keyOf = plot => plot.dataset.key.replace(/\\{(\\w+)\\}/g, (_, name) => choice(name));
const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;

function themed(layout, width, narrow) {
  const css = getComputedStyle(root), colour = name => css.getPropertyValue(name).trim();
  const copy = structuredClone(layout);
  copy.paper_bgcolor = copy.plot_bgcolor = "rgba(0,0,0,0)";
  copy.font = { ...copy.font, color: colour("--text"), family: getComputedStyle(document.body).fontFamily,
    size: narrow ? 11 : 13 };
  copy.hoverlabel = { ...copy.hoverlabel, bgcolor: colour("--card"), bordercolor: colour("--line"),
    font: { color: colour("--text"), size: 13 } };
  for (const name of Object.keys(copy).filter(key => /^[xy]axis/.test(key))) {
    Object.assign(copy[name], { gridcolor: colour("--grid"), linecolor: colour("--line"),
      zerolinecolor: colour("--zero"),
      automargin: true });
    if (narrow && copy[name].ticktext && name === "yaxis") copy[name].ticktext = copy[name].ticktext.map(
      text => text.length > 16 ? text.slice(0, 15) + "\\u2026" : text);
  }
  for (const shape of copy.shapes || []) shape.line.color = colour("--soft");
  copy.width = Math.floor(width);
  // Above a narrow plot the legend would take more room than the plot: the page writes it below instead.
  copy.showlegend = !narrow;
  return copy;
}

function draw(plot) {
  const key = keyOf(plot), figure = figures[key];
  plot.dataset.shown = key;
  const note = document.getElementById(plot.dataset.note);
  if (note) note.textContent = summaries[key] || "";
  const data = figure.data.map(trace => !trace.customdata ? trace :
    { ...trace, customdata: trace.customdata.map(place => figure.layout.meta[place]) });
  const width = plot.parentElement.clientWidth, narrow = width < 560;
  legend(plot, data.filter(trace => trace.showlegend !== false), narrow);
  return Plotly.react(plot, data, themed(figure.layout, width, narrow),
    { displaylogo: false, responsive: false, displayModeBar: false, scrollZoom: false, doubleClick: "reset" });
}

function legend(plot, traces, narrow) {
  const list = plot.parentElement.querySelector(".key");
  list.hidden = !narrow;
  list.replaceChildren(...traces.map(trace => {
    const item = document.createElement("li"), swatch = document.createElement("span");
    swatch.style.background = trace.marker?.color || trace.fillcolor || trace.line.color;
    item.append(swatch, trace.name);
    return item;
  }));
}
const drawAll = () => plots.forEach(draw);

function setTheme(name) {
  root.dataset.theme = name;
  try { localStorage.setItem("entrain-theme", name); } catch (error) { /* Shown all the same, only not kept. */ }
  label(); drawAll();
}
const button = document.getElementById("theme");
function label() { button.textContent = isDark() ? "Light theme" : "Dark theme"; }
button.addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
dark.addEventListener("change", () => { if (!root.dataset.theme) { label(); drawAll(); } });

for (const select of document.querySelectorAll("select[data-choice]")) {
  select.addEventListener("change", () => {
    for (const other of document.querySelectorAll(`select[data-choice="${select.dataset.choice}"]`))
      other.value = select.value;
    plots.filter(plot => plot.dataset.key.includes(`{${select.dataset.choice}}`)).forEach(draw);
  });
}
for (const tool of document.querySelectorAll("button[data-zoom]")) {
  tool.addEventListener("click", () => {
    const plot = document.getElementById(tool.dataset.plot), full = figures[plot.dataset.shown].layout.xaxis.range;
    let [from, to] = plot.layout.xaxis.range.map(Number);
    const width = to - from, middle = (from + to) / 2, step = tool.dataset.zoom;
    if (step === "in") [from, to] = [middle - width / 4, middle + width / 4];
    if (step === "out") [from, to] = [middle - width, middle + width];
    if (step === "left") [from, to] = [from - width / 3, to - width / 3];
    if (step === "right") [from, to] = [from + width / 3, to + width / 3];
    if (step === "all" || to - from > full[1] - full[0]) [from, to] = full;
    if (from < full[0]) [from, to] = [full[0], full[0] + to - from];
    if (to > full[1]) [from, to] = [full[1] - (to - from), full[1]];
    Plotly.relayout(plot, { "xaxis.range": [from, to] });
  });
}
let waiting = 0, width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth; clearTimeout(waiting); waiting = setTimeout(drawAll, 120);
});
label(); drawAll();
"""
