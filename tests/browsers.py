"""A real browser for tests of pages; they are skipped where there is none."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def open_browser(size: str) -> Iterator[Any]:
    """Headless Chromium with a window of ``size`` ("width,height"), which keeps what pages log."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    paths = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    binary, driver = next(filter(None, paths), None), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium with chromedriver on this machine (Debian: chromium, chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={size}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    try:
        yield opened
    finally:
        opened.quit()
