#!/usr/bin/env python3
"""Take screenshots of the chat page and of the whole report, at a desk's and a phone's size, light and dark.

    scripts/screenshots.py my/model --out pictures

It serves the model, asks one question and replays its trees. It needs selenium, chromium and chromedriver.
"""

import base64
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from served import serving

from yggdrasil.cli import checks, run_script
from yggdrasil.errors import YggdrasilError

QUESTION = "Write a Python function that reverses a list, and explain it in a table."
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ANSWER_SECONDS = 300
TREE = 12  # the iteration that is shown
DRAWN = "return [...document.querySelectorAll('.chart')].every(each => each.querySelector('.main-svg'))"


def main(
    model: Annotated[str, typer.Argument(help="A model or a plan.")],
    out: Annotated[Path, typer.Option(callback=checks.output_folder, help="Folder for the pictures.")],
    question: Annotated[str, typer.Option(help="What the page asks.")] = QUESTION,
) -> None:
    """Write page-SIZE-SCHEME.png and report-SIZE-SCHEME.png, and those of the empty page, trees and settings."""
    out.mkdir(parents=True, exist_ok=True)
    report = out / "report.html"
    with serving(model, "--greedy") as url, browser() as opened:
        command = [sys.executable, "-c", "from yggdrasil.cli import main; main()", "report", model, "--out", report]
        subprocess.run(list(map(str, command)), check=True)
        for size, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                _emulate(opened, width, height, scheme)
                opened.get(url)
                _wait(opened, "return model !== null", 60)
                opened.save_screenshot(str(out / f"empty-{size}-{scheme}.png"))
                _ask(opened, question)
                opened.save_screenshot(str(out / f"page-{size}-{scheme}.png"))
                opened.execute_script("unfold(); replay(document.querySelector('.assistant'), arguments[0])", TREE)
                opened.save_screenshot(str(out / f"trees-{size}-{scheme}.png"))
                opened.execute_script("$('settings').click()")
                opened.save_screenshot(str(out / f"settings-{size}-{scheme}.png"))
                opened.get(report.absolute().as_uri())
                _wait(opened, DRAWN, 60)
                _save_whole(opened, out / f"report-{size}-{scheme}.png")
    print(*sorted(map(str, out.glob("*.png"))), sep="\n")


def _ask(opened: Any, question: str) -> None:
    """Ask ``question`` on the page, and wait for the answer and the measurement of plain decoding."""
    opened.execute_script(
        "localStorage.clear(); $('colours').getAttribute('aria-pressed') === 'true' || $('colours').click();"
        "$('text').value = arguments[0]; $('ask').requestSubmit()", question,
    )  # fmt: skip
    _wait(opened, "return running === null && messages.length === 2", ANSWER_SECONDS)


def _emulate(opened: Any, width: int, height: int, scheme: str) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if width < 600 else 1, "mobile": width < 600}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def _save_whole(opened: Any, path: Path) -> None:
    """Save the page from its top to its end."""
    size = opened.execute_script("return [document.body.clientWidth, document.body.scrollHeight]")
    clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
    command = {"captureBeyondViewport": True, "clip": clip}
    path.write_bytes(base64.b64decode(opened.execute_cdp_cmd("Page.captureScreenshot", command)["data"]))


def _wait(opened: Any, script: str, seconds: float) -> None:
    from selenium.common import TimeoutException
    from selenium.webdriver.support.ui import WebDriverWait

    done: Callable[[Any], Any] = lambda page: page.execute_script(script)  # noqa: E731
    try:
        WebDriverWait(opened, seconds).until(done)
    except TimeoutException:
        raise YggdrasilError(f"the page was not ready after {seconds} s ({script})") from None


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium.

    Raises:
        YggdrasilError: selenium, chromium or chromedriver is missing.
    """
    programs = [next(filter(None, map(shutil.which, names)), None) for names in (BROWSERS, ["chromedriver"])]
    if None in programs or find_spec("selenium") is None:
        raise YggdrasilError("screenshots need chromium, chromedriver (Debian: chromium-driver) and selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    try:
        yield opened
    finally:
        opened.quit()


if __name__ == "__main__":
    run_script(main, "screenshots")
