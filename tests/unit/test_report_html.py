"""Figures that plotly accepts, and a page that needs nothing but itself."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from report_cases import small_content

from entrain_opt.report.figures import KIND_COLOURS, all_figures
from entrain_opt.report.page import page_html, write_page

VOID = {"meta", "link", "br", "input", "img"}


class Checker(HTMLParser):
    """Collects ids and references, and sees that elements close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.references, self.loads, self.scripts = [], [], [], [], 0

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.scripts += tag == "script"
        self.ids += [values["id"]] if "id" in values else []
        for name in ("aria-labelledby", "aria-describedby", "data-note", "data-plot"):
            self.references += values.get(name, "").split()
        self.references += [values["href"][1:]] if values.get("href", "").startswith("#") else []
        self.loads += [values[n] for n in ("src", "href") if n in values and not values[n].startswith(("#", "data:"))]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def html():
    return page_html(small_content(), "var Plotly = '</script>';")


@pytest.fixture(scope="module")
def parsed(html):
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    return checker


def test_every_figure_is_valid_for_plotly():
    from plotly.graph_objects import Figure

    for key, figure in all_figures(small_content()).items():
        assert Figure(figure).data, key


def test_a_figure_for_every_choice():
    content = small_content()
    keys = set(all_figures(content))
    for policy in content.policies:
        assert f"bubbles|{policy}" in keys
        for replica in content.replicas:
            assert {f"timeline|{policy}|{replica}", f"loads|{policy}|{replica}", f"memory-curves|{replica}"} <= keys


def test_timeline_texts_are_found_where_bars_point():
    figure = all_figures(small_content())["timeline|pairwise|0"]
    texts = figure["layout"]["meta"]
    for trace in figure["data"]:
        for place in trace.get("customdata", ()):
            assert 0 <= place < len(texts)


def test_kinds_have_colours_of_their_own():
    fills = [fill for fill, _ in KIND_COLOURS.values()]
    assert len(set(fills)) == len(fills)
    for fill, text in KIND_COLOURS.values():
        assert contrast(fill, text) >= 4.5


def contrast(one, two):
    """Of two colours, as the Web Content Accessibility Guidelines define it."""

    def luminance(colour):
        values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_page_loads_nothing(html, parsed):
    assert parsed.loads == []
    assert re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", html) == []
    assert "default-src 'none'" in html


def test_names_are_unique_and_references_resolve(parsed):
    assert len(parsed.ids) == len(set(parsed.ids))
    assert set(parsed.references) <= set(parsed.ids)


def test_nothing_in_data_or_library_ends_a_script(html, parsed):
    assert parsed.scripts == html.count("</script>")
    assert "small &lt;run&gt;" in html
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', html, re.DOTALL).group(1))
    assert figures == json.loads(json.dumps(all_figures(small_content())))


def test_every_figure_has_words(html):
    said = json.loads(re.search(r'id="summaries">(.*?)</script>', html, re.DOTALL).group(1))
    assert set(said) == set(all_figures(small_content()))
    assert all(said.values())


def test_written_page_holds_plotly_once_and_is_light(tmp_path):
    from plotly.offline import get_plotlyjs

    size, library = write_page(small_content(), tmp_path / "deep" / "report.html")
    text = (tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    assert size == (tmp_path / "deep" / "report.html").stat().st_size
    assert text.count(get_plotlyjs()[:200]) == 1
    assert size - library < 400_000
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["report.html"]
