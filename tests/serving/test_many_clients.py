"""Several clients of one decoder: what each gets is what it gets alone, and none holds the others."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

from bundled_server import wait_until

QUESTIONS = ["Write a function", "A class with two methods", "Sum a list", "Read a file"]


def answer(server, question, **body):
    return server.chat(question, max_tokens=16, **body)["choices"][0]["message"]["content"]


def streamed(server, question, **body):
    messages = [{"role": "user", "content": question}]
    chunks = server.stream("/v1/chat/completions", messages=messages, max_tokens=16, **body)
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_answers_under_load_are_those_given_alone(server):
    ways = [{}, {"temperature": 0.9, "seed": 4}, {"speculation": False}]
    asked = [(question, way) for question in QUESTIONS[:2] for way in ways]
    alone = [answer(server, question, **way) for question, way in asked]
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(get, server, question, **way) for question, way in asked for get in (answer, streamed)]
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
    (listener,) = server.uvicorn.servers[0].sockets
    usual = listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # those it accepts from now on have the same
    done = server.worker.meters.answers.labels("length")._value
    messages = [{"role": "user", "content": "Count"}]
    body = {"messages": messages, "max_tokens": 100, "logprobs": True, "top_logprobs": 20, "n": 2, "stream": True}
    data = json.dumps(body).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(listener.getsockname())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, usual // 2)  # the system doubles what it is told
        slow.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
        )
        before = done.get()
        wait_until(lambda: done.get() == before + 2)  # both of its answers are whole, and it has read none
        assert server.chat(max_tokens=4)["usage"]["completion_tokens"] == 4
        slow.settimeout(20)
        read = b""
        while b"data: [DONE]" not in read[-40:]:
            read += slow.recv(1 << 16)
    chunks = [json.loads(line[6:]) for line in read.decode().splitlines() if line.startswith("data: {")]
    assert len(read) > 200_000  # more than the buffers on the way hold
    assert sum(len((chunk["choices"][0]["logprobs"] or {"content": ()})["content"]) for chunk in chunks) == 200
