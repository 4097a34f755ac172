"""What tests of the chat page do in it: open it, press its buttons, watch what it sends."""

from bundled_server import wait_until

# Keeps the bodies that the page sends in ``sent``, and the plain replies that it measures in ``plain``.
WATCH = """
    window.sent = [];
    window.plain = [];
    const usual = window.fetch;
    window.fetch = async (path, options) => {
        const body = options && JSON.parse(options.body);
        if (body) sent.push(body);
        const reply = await usual(path, options);
        if (body?.speculation === false) reply.clone().json().then(each => plain.push(each));
        return reply;
    };
"""


def open_page(browser, server):
    """Open the page in a wide window, with nothing stored, and wait until it shows the model."""
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get(server.url)
    browser.execute_script("localStorage.clear()")
    wait_until(lambda: browser.find_element("id", "model").text == "tiny")


def press(browser, name):
    """Click a button below an answer; it may be drawn again at any time."""
    browser.execute_script(
        "[...document.querySelectorAll('.tools button')].find(each => each.textContent === arguments[0]).click()", name
    )


def ask(browser, text, tokens=12):
    """Ask ``text`` for a greedy answer of ``tokens`` tokens, and return its text when it has come and was measured."""
    browser.execute_script(
        "keep('options', {...kept('options', {}), max_tokens: arguments[0], temperature: '0'})", str(tokens)
    )
    before = browser.execute_script("return messages.length")
    browser.execute_script("$('text').value = arguments[0]; $('ask').requestSubmit()", text)
    wait_until(
        lambda: browser.execute_script("return running === null && messages.length === arguments[0]", before + 2)
    )
    return browser.execute_script("return messages.at(-1).content")


def ask_and_run_at_first_text(browser, script):
    """Ask for an answer of 400 tokens, and run the JavaScript ``script`` in the page when its first text arrives."""
    browser.execute_script(
        """
        keep("options", {max_tokens: "400", temperature: "0"});
        const run = new Function(arguments[0]);
        const seen = new MutationObserver(() => {
            if (!document.querySelector(".assistant")?.textContent) return;
            seen.disconnect();
            run();
        });
        seen.observe($("turns"), { childList: true, subtree: true });
        $("text").value = "Write a function";
        $("ask").requestSubmit();
    """,
        script,
    )
