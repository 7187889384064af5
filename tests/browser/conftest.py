"""A headless Chromium, where there is one; `make test-browser` installs it."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture
def browser():
    """A window of 1,600 pixels; a message of its console that is an error fails the test."""
    with window() as driver:
        yield driver
        errors = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        # Servers end before the window that watches them.
        assert [message for message in errors if "net::ERR_" not in message] == []


@pytest.fixture
def foreign_browser():
    """The same for pages of others, who look for servers that are not there and say so in the console."""
    with window() as driver:
        yield driver


@contextmanager
def window():
    if not CHROMIUM or not DRIVER:
        pytest.skip("chromium and chromium-driver are not installed: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1600,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()
