"""The chat page in a real browser: an answer, its trees and its figures, at a desk's width and a phone's."""

import pytest
from browsers import open_browser
from bundled_server import wait_until


@pytest.fixture(scope="module")
def browser():
    with open_browser("1200,800") as opened:
        yield opened


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_an_answer_with_its_trees(server, browser, tmp_path, width, scheme):
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
    browser.get(server.url)
    wait_until(lambda: browser.find_element("id", "model").text == "tiny")
    if width < 600:  # a phone's panel is folded until it is asked for
        assert not browser.find_element("id", "tree").is_displayed()
        browser.find_element("id", "panel").click()
    browser.find_element("id", "text").send_keys("Write a function\n")
    wait_until(lambda: browser.find_elements("css selector", "#stages .bar"), 60)

    assert browser.find_element("css selector", ".assistant").text.strip()
    assert len(browser.find_elements("css selector", "#tree circle")) >= 1
    assert float(browser.find_element("id", "pace").text) > 0
    assert (
        "drafted" in browser.find_element("id", "caption").text or "plain" in browser.find_element("id", "caption").text
    )
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor") != "rgb(251, 251, 248)"
    assert dark == (scheme == "dark")
    assert browser.get_log("browser") == []
    fetched = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert all(name.startswith((server.url, "data:")) for name in fetched)
    browser.save_screenshot(str(tmp_path / f"page-{width}.png"))


@pytest.mark.browser
def test_an_answer_that_a_new_chat_cuts_off_is_no_part_of_it(server, browser):
    browser.get(server.url)
    wait_until(lambda: browser.find_element("id", "model").text == "tiny")
    browser.execute_script("""
        const seen = new MutationObserver(() => {
            if (!document.querySelector(".assistant")?.textContent) return;
            seen.disconnect();
            $("new").click();
        });
        seen.observe($("turns"), { childList: true, subtree: true });
        $("text").value = "Write a function";
        $("ask").requestSubmit();
    """)
    wait_until(lambda: browser.execute_script("return running === null"))

    assert browser.execute_script("return messages") == []
    assert browser.find_elements("css selector", ".turn") == []
