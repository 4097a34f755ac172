"""What a person does on the chat page, in a real browser: copying, settings, mistakes, a lost connection, old chats."""

import pytest
from bundled_server import wait_until
from chat_page import WATCH, ask, ask_and_run_at_first_text, open_page, press

CODE = 'def f():\n    return "x"'
DRAFTERS = {  # names that drafters have, and the colours of their tokens
    "text": "ngram", "text + table": "ngram", "n-gram": "ngram", "grammar": "ngram",
    "model stable-code-text": "draft", "model tiny, guided": "draft", "model tiny + text": "draft",
    "head table-of-eagles": "head", "heads medusa": "head", "block head dflash + text": "head",
}  # fmt: skip


@pytest.fixture
def keys():
    return pytest.importorskip("selenium.webdriver.common.keys", reason="selenium is not installed").Keys


def pasted(browser, keys):
    """What the clipboard holds, as the question's field takes it."""
    field = browser.find_element("id", "text")
    field.clear()
    field.send_keys(keys.CONTROL, "v")
    return field.get_attribute("value")


@pytest.mark.browser
@pytest.mark.parametrize("is_secure", [True, False])
def test_copy_buttons_copy_code_and_answers(server, browser, keys, is_secure):
    """Over plain HTTP on another machine a page has no clipboard: the older way has to do."""
    open_page(browser, server)
    if not is_secure:
        browser.execute_script("navigator.clipboard.writeText = () => Promise.reject(new Error('not here'))")
    answer = f"So:\n\n```python\n{CODE}\n```\n"
    browser.execute_script("messages = [{role: 'assistant', content: arguments[0]}]; drawTurns()", answer)
    for place, text in ((".code button", CODE), (".tools button", answer)):
        button = browser.find_element("css selector", place)
        assert button.text == "Copy"
        button.click()
        wait_until(lambda button=button: button.text == "Copied")
        assert pasted(browser, keys) == text


@pytest.mark.browser
def test_settings_are_sent_and_outlast_the_page(server, browser, keys):
    open_page(browser, server)

    def fill(**values):
        browser.find_element("id", "settings").click()
        for name, value in values.items():
            browser.find_element("name", name).clear()
            browser.find_element("name", name).send_keys(value)

    def is_open():
        return browser.execute_script("return $('options').open")

    def shown():
        browser.find_element("id", "settings").click()
        value = browser.find_element("name", "system").get_attribute("value")
        browser.find_element("name", "system").send_keys(keys.ESCAPE)
        return value

    fill(system="Answer as a pirate.", temperature="0,5", max_tokens="8")
    browser.find_element("css selector", "[value=save]").click()
    fill(system="given up", temperature=keys.ESCAPE)
    browser.refresh()
    wait_until(lambda: browser.find_element("id", "model").text == "tiny")
    browser.execute_script(WATCH)
    browser.find_element("id", "text").send_keys("Write a function\n")
    wait_until(lambda: browser.execute_script("return running === null && messages.length === 2"))
    body = browser.execute_script("return sent[0]")
    fill(temperature="hot")
    browser.find_element("css selector", "[value=save]").click()
    refused = is_open()
    browser.find_element("name", "temperature").clear()
    browser.find_element("name", "temperature").send_keys("0.25" + keys.ENTER)
    saved = browser.execute_script("return kept('options', {})")
    before = shown()
    browser.find_element("id", "settings").click()
    browser.find_element("id", "reset").click()

    assert body["messages"] == [
        {"role": "system", "content": "Answer as a pirate."}, {"role": "user", "content": "Write a function"},
    ]  # fmt: skip
    assert (body["temperature"], body["max_tokens"], "top_p" in body) == (0.5, 8, False)
    assert refused, "a temperature that is no number was taken"
    assert (saved["temperature"], saved["system"], is_open()) == ("0.25", "Answer as a pirate.", False)
    assert (before, shown()) == ("Answer as a pirate.", "")


@pytest.mark.browser
def test_a_lost_connection_is_told_and_the_question_goes_out_with_the_next_one(server, browser):
    open_page(browser, server)
    browser.execute_script(WATCH)
    browser.find_element("id", "colours").click()
    browser.set_network_conditions(offline=True, latency=0, throughput=-1)
    try:
        browser.find_element("id", "text").send_keys("Is anybody there?\n")
        wait_until(lambda: browser.find_elements("css selector", ".fault"))
        message = browser.find_element("css selector", ".fault .body").text
        press(browser, "Retry")
        wait_until(lambda: browser.execute_script("return running === null && document.querySelector('.fault')"))
    finally:
        browser.delete_network_conditions()
    answer = ask(browser, "And now?")
    slider = "const slider = $('replay'); slider.value = 1; slider.dispatchEvent(new Event('input'));"
    browser.execute_script(slider)

    assert message == "The server cannot be reached, or it ended."
    assert browser.execute_script("return sent.filter(each => each.stream).at(-1).messages") == [
        {"role": "user", "content": "Is anybody there?\n\nAnd now?"}
    ]
    assert browser.find_elements("css selector", ".fault") == []
    turns = browser.execute_script("return [...document.querySelectorAll('.turn')].map(each => each.body.textContent)")
    assert turns[:2] == ["Is anybody there?", "And now?"], "trees are replayed in the answer's own turn"
    assert len(turns) == 3
    assert answer


@pytest.mark.browser
def test_a_refused_question_can_be_asked_again(server, browser):
    open_page(browser, server)
    browser.execute_script(WATCH + "keep('options', {top_p: '5'})")
    browser.find_element("id", "text").send_keys("Write a function\n")
    wait_until(lambda: browser.find_elements("css selector", ".fault"))
    message = browser.find_element("css selector", ".fault .body").text
    browser.execute_script("keep('options', {max_tokens: '4', temperature: '0'})")
    press(browser, "Retry")
    wait_until(lambda: browser.execute_script("return running === null && messages.length === 2"))

    assert "top_p" in message
    assert browser.find_elements("css selector", ".fault") == []


@pytest.mark.browser
def test_the_badge_is_what_was_measured_for_this_answer(server, browser):
    open_page(browser, server)
    browser.execute_script(WATCH)
    answer = ask(browser, "Write a function", tokens=24)
    wait_until(lambda: browser.find_elements("css selector", ".badge"))
    (body,), (plain,) = browser.execute_script("return [sent.filter(each => !each.stream), plain]")
    own = browser.execute_script("return messages[1].timings.predicted_per_token_ms")
    badge = browser.find_element("css selector", ".badge").text
    # Measured again, a plain reply that was faster is no praise, and one whose text is another is told, not hidden.
    for change, look in (
        ("timings: {predicted_per_token_ms: 0.001}", "slow"),
        ("choices: [{message: {content: 'o'}}]", "bad"),
    ):
        browser.execute_script(f"post = async () => ({{json: async () => ({{...plain[0], {change}}})}})")
        browser.find_element("css selector", ".badge").click()
        wait_until(lambda look=look: browser.find_elements("css selector", f".badge.{look}"))

    assert (body["speculation"], body["max_tokens"]) == (False, 24)
    assert answer.startswith(plain["choices"][0]["message"]["content"].rstrip("\ufffd").rstrip())
    assert badge == f"{plain['timings']['predicted_per_token_ms'] / own:.1f} × plain, same tokens"
    assert "other tokens" in browser.find_element("css selector", ".badge.bad").text


@pytest.mark.browser
@pytest.mark.parametrize(("drafter", "colour"), DRAFTERS.items())
def test_tokens_have_the_colour_of_their_drafter(server, browser, drafter, colour):
    """Nodes behind those of the drafter were added by n-grams, whoever it is."""
    if browser.current_url != server.url + "/":
        open_page(browser, server)
    found = browser.execute_script(
        "return [1, 3].map(node => guesser({drafter: arguments[0], drafted: 2}, node))", drafter
    )
    assert found == [colour, "ngram"]


@pytest.mark.browser
def test_chats_outlast_the_page_until_they_are_deleted(server, browser):
    open_page(browser, server)
    answers = [ask(browser, "Write a function", tokens=4)]
    browser.find_element("id", "new").click()
    answers.append(ask(browser, "Write a class", tokens=4))
    browser.refresh()
    browser.find_element("id", "history").click()
    titles = [each.text for each in browser.find_elements("css selector", "#list .name")]
    places = [each.rect for each in browser.find_elements("css selector", "#list > div")]
    browser.find_elements("xpath", "//*[@id='list']//button[text()='Delete']")[1].click()
    left = [each.text for each in browser.find_elements("css selector", "#list .name")]
    browser.find_element("css selector", "#list .name").click()
    shown = browser.execute_script("return messages.map(each => each.content)")
    browser.find_element("id", "history").click()
    browser.find_element("id", "forget").click()

    assert places[0]["x"] == places[1]["x"]
    assert places[0]["y"] + places[0]["height"] <= places[1]["y"], "one chat a line"
    assert (titles, left) == (["Write a class", "Write a function"], ["Write a class"])
    assert shown == ["Write a class", answers[1]]
    assert browser.find_elements("css selector", "#list .name") == []


@pytest.mark.browser
def test_an_edited_question_takes_the_place_of_the_old_one(server, browser):
    open_page(browser, server)
    ask(browser, "Write a function", tokens=4)
    press(browser, "Edit")
    browser.find_element("id", "text").send_keys(" in C\n")
    wait_until(lambda: browser.execute_script("return running === null && messages.length === 2"))

    assert browser.find_element("css selector", ".user .body").text == "Write a function in C"
    assert browser.execute_script("return kept('chats', []).map(each => each.title)") == ["Write a function in C"]


@pytest.mark.browser
def test_a_waiting_question_stays_in_its_field_and_stop_sends_it(server, browser):
    open_page(browser, server)
    ask_and_run_at_first_text(
        browser,
        """
        $("text").value = "And another";
        $("ask").requestSubmit();
        window.waiting = [$("text").value, $("hint").textContent];
        keep("options", {max_tokens: "4", temperature: "0"});
        $("stop").click();
    """,
    )
    wait_until(lambda: browser.execute_script("return messages.length === 4 && running === null"))

    assert browser.execute_script("return waiting") == ["And another", "Sent when this answer ends; Stop ends it now."]
    assert browser.execute_script("return messages[1].cut") == "stopped"
    assert browser.execute_script("return [messages[2].content, $('text').value, $('hint').textContent]") == [
        "And another", "", "",
    ]  # fmt: skip


@pytest.mark.browser
def test_comments_and_strings_are_those_of_the_language(server, browser):
    open_page(browser, server)

    def marked(language, code):
        answer = f"```{language}\n{code}\n```"
        browser.execute_script("messages = [{role: 'assistant', content: arguments[0]}]; drawTurns()", answer)
        marks = "return [...document.querySelectorAll('.code .com, .code .str')].map(each => each.textContent)"
        assert browser.find_element("css selector", ".code pre").text == code
        return browser.execute_script(marks)

    assert marked("python", 'half = a // b  # if "whole"\n"""in\nlines"""') == ['# if "whole"', '"""in\nlines"""']
    assert marked("css", "p { color: #fff; } /* white */") == ["/* white */"]
    assert marked("sql", "select 1 -- one") == ["-- one"]
    assert marked("C", '#include "f.h" // it') == ['"f.h"', "// it"]
    assert marked("", "# what\n// ever") == ["# what", "// ever"]
