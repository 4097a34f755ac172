"""Several clients of one decoder: what each gets is what it gets alone, and none holds the others."""

from concurrent.futures import ThreadPoolExecutor

from bundled_server import chunks_of, until_done, wait_until

QUESTIONS = ["Write a function", "A class with two methods", "Sum a list", "Read a file"]


def answer(server, question, **body):
    return server.chat(question, max_tokens=16, **body)["choices"][0]["message"]["content"]


def streamed(server, question, **body):
    messages = [{"role": "user", "content": question}]
    chunks = server.stream("/v1/chat/completions", messages=messages, max_tokens=16, **body)
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_answers_under_load_are_those_given_alone(server):
    ways = [{}, {"temperature": 0.9, "seed": 4}, {"speculation": False}]
    questions = [(question, way) for question in QUESTIONS[:2] for way in ways]
    alone = [answer(server, question, **way) for question, way in questions]
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(get, server, question, **way) for question, way in questions for get in (answer, streamed)]
        assert [each.result() for each in found] == [text for text in alone for _ in range(2)]


def test_conversations_that_take_turns_are_each_read_once(server):
    more = "and say what it is for, how it is called, and what comes back of it"
    chats = {question: [{"role": "user", "content": f"{question}, {more}"}] for question in QUESTIONS}
    for number in range(3):
        for messages in chats.values():
            reply = server.post("/v1/chat/completions", messages=messages, max_tokens=12)
            usage = reply["usage"]
            read = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            assert read == reply["timings"]["prompt_n"]
            assert number == 0 or read < usage["prompt_tokens"] / 2
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
            messages.append({"role": "user", "content": "Go on"})


def test_who_reads_nothing_holds_nobody(server):
    """Its stream fills every buffer on the way, and the next client is served all the same."""
    done = server.worker.meters.answers.labels("length")._value
    before, messages = done.get(), [{"role": "user", "content": "Count"}]
    body = {"messages": messages, "max_tokens": 100, "logprobs": True, "top_logprobs": 20, "n": 2}
    with server.slow_stream(buffer_bytes=4096, **body) as slow:
        wait_until(lambda: done.get() == before + 2)  # both of its answers are whole, and it has read none
        assert server.chat(max_tokens=4)["usage"]["completion_tokens"] == 4
        read = until_done(slow)
    chunks = chunks_of(read)
    assert len(read) > 200_000  # more than the buffers on the way hold
    assert sum(len((chunk["choices"][0]["logprobs"] or {"content": ()})["content"]) for chunk in chunks) == 200
