"""The chat page in a real browser: an answer, its trees and its figures, in a wide window and on a phone."""

import pytest
from bundled_server import wait_until
from chat_page import ask_and_run_at_first_text, open_page, press


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_an_answer_with_its_trees(server, browser, tmp_path, width, scheme):
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
    browser.get(server.url)
    wait_until(lambda: browser.find_element("id", "model").text == "tiny")
    if width < 600:  # a phone's panel is folded until it is opened
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


ANSWER = """Some **bold** words, `code` and <b>no tag</b>:

1. one
   - inner
2. two

```python
def f():  # note
    return "x" + 1
```

| a | b |
|---|---|
| 1 | 2 |
"""


@pytest.mark.browser
def test_an_answer_is_read_as_markdown(server, browser):
    open_page(browser, server)
    browser.execute_script("messages = [{role: 'assistant', content: arguments[0]}]; drawTurns();", ANSWER)
    texts = browser.execute_script("""
        return ["strong", "p code", "ol > li", "ol > li ul li", ".code pre", ".kw", ".str", ".num", ".com", "th", "td"]
            .map(each => document.querySelector(".assistant " + each).textContent);
    """)

    assert texts[:2] == ["bold", "code"]
    assert texts[3:] == [
        "inner", 'def f():  # note\n    return "x" + 1', "def", '"x"', "1", "# note", " a ", " 1 ",
    ]  # fmt: skip
    assert "<b>no tag</b>" in browser.find_element("css selector", ".assistant p").text
    assert browser.find_elements("css selector", ".assistant b") == []


@pytest.mark.browser
def test_tokens_are_coloured_and_trees_replayed(server, browser):
    open_page(browser, server)
    browser.execute_script("keep('options', {max_tokens: '24'})")
    browser.find_element("id", "text").send_keys("Write a function\n")
    wait_until(lambda: browser.find_elements("css selector", ".badge"))
    text = browser.execute_script("return messages[1].content")
    browser.find_element("id", "colours").click()

    assert "same tokens" in browser.find_element("css selector", ".badge").text
    spans = browser.execute_script(
        "return messages[1].parts.map(part => messages[1].content.slice(part.start, part.end))"
    )
    assert "".join(spans) == text
    assert browser.find_elements("css selector", ".assistant .draft")
    slider = "const slider = $('replay'); slider.value = 1; slider.dispatchEvent(new Event('input'));"
    browser.execute_script(slider)
    assert browser.find_element("id", "number").text.startswith("1 of ")
    assert browser.find_elements("css selector", ".assistant .now")


@pytest.mark.browser
def test_a_question_during_an_answer_waits_and_chats_are_kept(server, browser):
    open_page(browser, server)
    browser.execute_script("""
        keep("options", {max_tokens: "12", temperature: "0"});
        const seen = new MutationObserver(() => {
            if (!document.querySelector(".assistant")) return;
            seen.disconnect();
            $("text").value = "And another";
            $("ask").requestSubmit();
        });
        seen.observe($("turns"), { childList: true, subtree: true });
        $("text").value = "Write a function";
        $("ask").requestSubmit();
    """)
    wait_until(lambda: browser.execute_script("return messages.length === 4 && running === null"))
    contents = browser.execute_script("return messages.map(each => each.content)")
    assert contents[::2] == ["Write a function", "And another"]
    browser.find_element("id", "new").click()
    browser.find_element("id", "history").click()
    browser.find_element("css selector", "#list .name").click()
    assert browser.execute_script("return messages.map(each => each.content)") == contents
    browser.find_elements("css selector", ".user button")[1].click()  # edit the second question
    assert browser.find_element("id", "text").get_attribute("value") == "And another"
    assert len(browser.find_elements("css selector", ".turn")) == 2


@pytest.mark.browser
def test_a_cut_answer_continues_and_its_trees_are_stored_with_the_chat(server, browser):
    open_page(browser, server)
    browser.execute_script("keep('options', {max_tokens: '10', temperature: '0'})")
    browser.find_element("id", "text").send_keys("Write a function\n")
    wait_until(lambda: browser.find_elements("xpath", "//button[text()='Continue']"))
    begun, trees = browser.execute_script("return [messages[1].content, messages[1].trees.length]")
    press(browser, "Continue")
    wait_until(lambda: browser.execute_script("return running === null && messages.length === 2"))
    whole, parts, all_trees = browser.execute_script(
        "return [messages[1].content, messages[1].parts, messages[1].trees.length]"
    )
    browser.execute_script("const found = kept('chats', []); openChat(null); openChat(found[0]);")
    press(browser, "Trees")

    assert whole.startswith(begun)
    assert len(whole) > len(begun)
    assert "".join(whole[part["start"] : part["end"]] for part in parts) == whole
    assert all_trees > trees
    assert browser.find_element("id", "number").text == f"{all_trees} of {all_trees}"
    assert browser.execute_script("return messages.length") == 2


@pytest.mark.browser
def test_a_browser_without_room_stores_chats_without_their_trees(server, browser):
    open_page(browser, server)
    stored = browser.execute_script("""
        const set = Storage.prototype.setItem;
        Storage.prototype.setItem = function (name, value) {
            if (value.includes("many trees")) throw new DOMException("full", "QuotaExceededError");
            set.call(this, name, value);
        };
        const answer = {role: "assistant", content: "b", trees: ["many trees"], cut: "stopped"};
        messages = [{role: "user", content: "a"}, answer];
        keepChat();
        Storage.prototype.setItem = set;
        return kept("chats", [])[0].messages;
    """)

    assert stored == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "cut": "stopped"}]


@pytest.mark.browser
def test_enter_while_letters_are_composed_sends_nothing(server, browser):
    open_page(browser, server)
    browser.execute_script("""
        $("text").value = "k";
        $("text").dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", isComposing: true, bubbles: true}));
    """)
    assert browser.execute_script("return messages") == []
    assert browser.find_element("id", "text").get_attribute("value") == "k"


@pytest.mark.browser
def test_a_full_context_is_told_with_a_way_on(server, browser):
    open_page(browser, server)
    browser.execute_script("""
        messages = [{role: "user", content: "word ".repeat(600)}, {role: "assistant", content: "a"}];
        keep("options", {max_tokens: "4", temperature: "0"});
        drawTurns();
        $("text").value = "And now?";
        $("ask").requestSubmit();
    """)
    wait_until(lambda: browser.find_elements("css selector", ".fault button"))
    assert "the context holds" in browser.find_element("css selector", ".fault").text
    browser.find_element("css selector", ".fault button").click()
    wait_until(lambda: browser.execute_script("return messages.length === 2 && running === null"))
    assert browser.execute_script("return messages[0].content") == "And now?"


@pytest.mark.browser
def test_a_stopped_answer_keeps_its_text_and_can_be_asked_for_again(server, browser):
    open_page(browser, server)
    ask_and_run_at_first_text(browser, "$('stop').click()")
    wait_until(lambda: browser.execute_script("return running === null && messages.length === 2"))
    text, cut = browser.execute_script("return [messages[1].content, messages[1].cut]")
    browser.execute_script("keep('options', {max_tokens: '6', temperature: '0'})")
    press(browser, "Retry")
    wait_until(lambda: browser.execute_script("return running === null && messages[1]?.cut.startsWith('cut')"))

    assert (bool(text), cut) == (True, "stopped")
    assert browser.execute_script("return messages.map(each => each.role)") == ["user", "assistant"]
    again = browser.execute_script("return messages[1].content")
    assert text.startswith(again) or again.startswith(text)


@pytest.mark.browser
def test_scrolled_up_the_page_stays_where_it_is_while_text_arrives(server, browser):
    open_page(browser, server)
    browser.execute_script("""
        messages = [{role: "user", content: "line\\n\\n".repeat(60)}, {role: "assistant", content: "b"}];
        drawTurns();
        keep("options", {max_tokens: "24", temperature: "0"});
        const seen = new MutationObserver(() => {
            const turns = [...document.querySelectorAll(".assistant")];
            if (turns.length < 2 || !turns[1].textContent) return;
            seen.disconnect();
            $("turns").scrollTop = 40;
        });
        seen.observe($("turns"), { childList: true, subtree: true });
        $("text").value = "Write a function";
        $("ask").requestSubmit();
    """)
    wait_until(lambda: browser.execute_script("return running === null && messages.length === 4"))
    assert browser.execute_script("return $('turns').scrollTop") == 40
    assert browser.execute_script("return $('turns').scrollHeight - $('turns').clientHeight") > 100
