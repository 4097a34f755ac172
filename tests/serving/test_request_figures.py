"""Figures of answers: what plain decoding would have taken, and what the metrics say of the line."""

from types import SimpleNamespace

import pytest
from bundled_server import wait_until

from yggdrasil.serving.metrics import ServerMetrics
from yggdrasil.serving.usage import plain_ms


def test_plain_decoding_costs_what_the_plan_measured_at_each_length():
    """10 ms at a context of 100, 20 at 200: five tokens after the first, from 148 on, cost between the two."""
    costs = [SimpleNamespace(context=context, plain_ms=ms) for context, ms in ((100, 10.0), (200, 20.0))]
    result = SimpleNamespace(prompt_tokens=147, tokens=[0] * 6)

    assert plain_ms(result, SimpleNamespace(costs=costs)) == pytest.approx(14.8 + 14.9 + 15.0 + 15.1 + 15.2)
    assert plain_ms(SimpleNamespace(prompt_tokens=147, tokens=[0]), SimpleNamespace(costs=costs)) == 0
    assert plain_ms(result, None) is None


def test_metrics_tell_of_the_line_the_caches_and_the_process(server):
    def read():
        lines = [line for line in server.client.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    before = read()
    for _ in range(2):
        server.chat("The same question twice", max_tokens=6)
    wait_until(lambda: read()["yggdrasil_busy"] == 0)  # the answer is told before the decoder is free
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after}

    assert after["yggdrasil_queue_depth"] == 0
    assert grown["yggdrasil_queue_position_count"] == grown["yggdrasil_queue_wait_seconds_count"] == 2
    assert grown["yggdrasil_generated_tokens_total"] == 12
    assert grown["yggdrasil_cached_prompt_tokens_total"] > 5
    assert grown['yggdrasil_answers_total{reason="length"}'] == 2
    assert after.get("process_resident_memory_bytes", 1) > 0


def test_an_answer_given_up_before_its_first_token_took_no_time_to_it(alone):
    meters, request = ServerMetrics(lambda: 0), alone.start("a prompt of some length " * 20)
    next(iter(request))  # a part of the prompt was read
    meters.record(request.result())
    page = meters.page().decode()

    assert 'answers_total{reason="cancelled"} 1.0' in page
    assert "time_to_first_token_seconds_count 0.0" in page
    assert "yggdrasil_prompt_tokens_total 0.0" in page
