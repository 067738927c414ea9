"""A headless browser for pages on disk."""

from __future__ import annotations

import shutil

import pytest

ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A Chrome or Chromium that logs its console and its requests; skips where there is none."""
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium (or google-chrome) with chromedriver on this machine: apt-get install chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install '.[dev]'")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    instance = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield instance
    instance.quit()
