"""The line: clients take turns, it is bounded, and who leaves leaves no trace."""

import pytest

from yggdrasil.serving.errors import Fault
from yggdrasil.serving.jobs import Failed, Job, QueuedRequest
from yggdrasil.serving.request_queue import RequestQueue


def ask(client, *names):
    events = []
    found = QueuedRequest(client, [Job([name], {}, events.append) for name in names])
    return found, events


def taken(line):
    return line.take()[1].prompt[0]


def test_each_clients_requests_keep_their_order_and_clients_take_turns():
    line = RequestQueue(10)
    for client, names in (("a", [1, 2]), ("a", [3]), ("b", [4]), ("c", [5])):
        line.join(ask(client, *names)[0], 1.0)

    assert [taken(line) for _ in range(5)] == [1, 4, 5, 2, 3]
    assert len(line) == 0


def test_a_full_line_refuses_and_says_when_to_come_back():
    line = RequestQueue(1)
    assert line.join(ask("a", 1)[0], 1.0) == 0
    with pytest.raises(Fault, match="1 requests are waiting") as refused:
        line.join(ask("b", 2)[0], 6.6)

    assert refused.value.status == 429
    assert refused.value.headers == {"Retry-After": "7"}


def test_who_leaves_makes_room():
    line = RequestQueue(1)
    first, _ = ask("a", 1, 2)
    line.join(first, 1.0)
    assert taken(line) == 1
    line.leave(first)
    line.leave(first)
    line.join(ask("b", 3)[0], 1.0)

    assert taken(line) == 3
    assert len(line) == 0


def test_what_has_begun_goes_on_behind_a_closed_line_unless_it_ends_too():
    line = RequestQueue(4)
    (begun, later_events), (waiting, refused) = ask("a", 1, 2, 3), ask("b", 4)
    for each in (begun, waiting):
        line.join(each, 1.0)
    assert taken(line) == 1
    line.close()
    assert [event.error.status for event in refused] == [503]

    assert taken(line) == 2
    assert later_events == []
    line.close(ends_begun=True)
    assert [event.error.status for event in later_events] == [503]
    assert line.take() is None


def test_a_closed_line_tells_those_who_waited():
    line = RequestQueue(4)
    waiting, events = ask("a", 1, 2)
    line.join(waiting, 1.0)
    line.close()

    assert line.take() is None
    assert [event.error.status for event in events if isinstance(event, Failed)] == [503, 503]
    with pytest.raises(Fault, match="shutting down"):
        line.join(ask("b", 3)[0], 1.0)
