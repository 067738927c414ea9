"""The report in a browser: it draws, answers, and asks nothing of the network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))

DRAWN = "return [...document.querySelectorAll('.plot')].every(p => p.querySelector('.main-svg'))"
SHOWN = "return document.getElementById('timeline-plot').dataset.shown"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    from report_cases import small_content

    from entrain_opt.report.page import write_page

    path = tmp_path_factory.mktemp("report") / "report.html"
    write_page(small_content(), path)
    return path.as_uri()


@pytest.fixture
def opened(browser, page):
    from selenium.webdriver.support.ui import WebDriverWait

    resize(browser, 1280)
    browser.get(page)
    browser.execute_script("localStorage.clear()")
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page)
    WebDriverWait(browser, 30).until(lambda b: b.execute_script(DRAWN))
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def resize(browser, width):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def element(browser, selector):
    from selenium.webdriver.common.by import By

    return browser.find_element(By.CSS_SELECTOR, selector)


def until(browser, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 30).until(condition)


def choose(browser, name, value):
    from selenium.webdriver.support.ui import Select

    Select(element(browser, f"#timeline select[data-choice={name}]")).select_by_value(value)


def colour(browser):
    return browser.execute_script("return getComputedStyle(document.body).backgroundColor")


def axis_range(browser):
    return browser.execute_script("return document.getElementById('timeline-plot').layout.xaxis.range.map(Number)")


def test_loads_without_network_or_errors(opened, page):
    requested = [
        message["params"]["request"]["url"]
        for entry in opened.get_log("performance")
        for message in [json.loads(entry["message"])["message"]]
        if message["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in requested if not url.startswith(("file:", "data:", "blob:"))] == []
    assert requested.count(page) == 1
    assert element(opened, "#headline").text
    assert opened.get_log("browser") == []


def test_theme_toggles_and_persists(opened, page):
    before = colour(opened)
    element(opened, "#theme").click()
    changed = until(opened, lambda b: colour(b) if colour(b) != before else None)
    opened.get(page)
    assert colour(opened) == changed
    element(opened, "#theme").click()
    until(opened, lambda b: colour(b) == before)


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_text_of_figures_follows_the_system_theme(opened, page, scheme):
    feature = [{"name": "prefers-color-scheme", "value": scheme}]
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
    opened.get(page)
    until(opened, lambda b: b.execute_script(DRAWN))
    drawn = opened.execute_script("return document.getElementById('timeline-plot').layout.font.color")
    text = opened.execute_script("return getComputedStyle(document.documentElement).getPropertyValue('--text')")
    assert drawn == text.strip()
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_choices_change_the_figures_and_their_words(opened):
    first, words = opened.execute_script(SHOWN), element(opened, "#timeline-plot-note").text
    policy, replica = first.split("|")[1:]
    options = opened.execute_script("return [...document.querySelectorAll('#timeline option')].map(o => o.value)")
    other = next(value for value in options if value.isdigit() and value != replica)
    choose(opened, "replica", other)
    assert opened.execute_script(SHOWN) == f"timeline|{policy}|{other}"
    assert element(opened, "#timeline-plot-note").text != words
    # The same choice elsewhere follows.
    assert opened.execute_script("return document.getElementById('memory-curves').dataset.shown").endswith(f"|{other}")
    choose(opened, "policy", "in_order")
    assert opened.execute_script(SHOWN) == f"timeline|in_order|{other}"


def test_timeline_zooms_with_buttons_and_by_dragging(opened):
    from selenium.webdriver.common.action_chains import ActionChains

    whole = axis_range(opened)
    for step, check in (
        ("in", lambda now: now[1] - now[0] < whole[1] - whole[0]),
        ("right", lambda now: now[0] > whole[0]),
        ("all", lambda now: now == whole),
    ):
        element(opened, f"button[data-zoom={step}]").click()
        until(opened, lambda b, check=check: check(axis_range(b)))
    surface = element(opened, "#timeline-plot .nsewdrag")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", surface)
    quarter = int(surface.rect["width"] // 4)

    def narrower_after_dragging(browser):
        # A busy page may miss what the pointer did while it was drawing.
        chain = ActionChains(browser).move_to_element_with_offset(surface, -quarter, 0).click_and_hold()
        chain.move_by_offset(quarter, 0).move_by_offset(quarter, 0).release().perform()
        return axis_range(browser)[1] - axis_range(browser)[0] < 0.7 * (whole[1] - whole[0])

    until(opened, narrower_after_dragging)


def test_hover_names_unit_start_end_and_samples(opened):
    from selenium.webdriver.common.action_chains import ActionChains

    place, start, end = opened.execute_script(
        "const data = document.getElementById('timeline-plot').data, i = data.findIndex(t => t.name === 'LLM forward');"
        "return [i, data[i].base[0], data[i].base[0] + data[i].x[0]]"
    )
    bar = opened.execute_script(
        "const traces = document.querySelectorAll('#timeline-plot .barlayer .trace');"
        "const bar = traces[arguments[0]].querySelector('.point path');"
        "bar.scrollIntoView({block: 'center', behavior: 'instant'}); return bar",
        place,
    )

    def hovered(browser):
        ActionChains(browser).move_to_element_with_offset(bar, 1, 0).move_to_element(bar).perform()
        return browser.execute_script(
            "const layer = document.querySelector('#timeline-plot .hoverlayer'); return layer && layer.textContent"
        )

    text = until(opened, hovered)
    assert all(word in text for word in ("LLM forward", "microbatch 0", "samples", "tokens"))
    said = [float(text.split(f"{word} at ")[1].split()[0].rstrip(",")) for word in ("starts", "ends")]
    assert said == pytest.approx([start, end], rel=1e-3)
    assert start > 0


@pytest.mark.parametrize("width", [400, 1280])
def test_no_horizontal_scrolling_of_the_page(opened, width):
    resize(opened, width)
    opened.refresh()
    until(opened, lambda b: b.execute_script(DRAWN))
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    wide = opened.execute_script(
        "return [...document.querySelectorAll('.plot svg.main-svg')].map(s => s.getBoundingClientRect().right)"
    )
    assert max(wide) <= width
    # A table scrolls within itself, and the keyboard reaches it.
    scrolls = opened.execute_script("return [...document.querySelectorAll('.scroll')].map(s => s.tabIndex)")
    assert set(scrolls) == {0}


def test_focus_is_visible_and_figures_have_names(opened):
    from selenium.webdriver.common.keys import Keys

    body = element(opened, "body")
    for _ in range(3):
        body.send_keys(Keys.TAB)
        width = opened.execute_script("return getComputedStyle(document.activeElement).outlineWidth")
        assert float(width.removesuffix("px")) >= 2
        body = opened.switch_to.active_element
    names = opened.execute_script(
        "return [...document.querySelectorAll('.plot')].map(p => p.getAttribute('aria-label'))"
    )
    assert all(names)
    words = opened.execute_script(
        "return [...document.querySelectorAll('figcaption [id$=-note]')].map(n => n.textContent)"
    )
    assert all(words)
