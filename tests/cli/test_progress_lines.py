"""Progress without a terminal: lines now and then, from phases that take a while, also where they compute silently."""

import threading
import time

from yggdrasil.cli.progress import ProgressLines


def test_a_long_phase_writes_a_line_now_and_then_and_a_short_one_none(capsys):
    lines = ProgressLines(every=0.05, first=0.02)
    report = lines.phase("compiling")
    said = ""
    while said.count("\n") < 2:
        time.sleep(0.01)
        said += capsys.readouterr().err
    report(0.5)
    while "50%" not in said:
        time.sleep(0.01)
        said += capsys.readouterr().err
    lines.close()

    assert all(line.startswith("yggdrasil: compiling: 0 s") for line in said.splitlines())
    assert threading.active_count() >= 1


def test_lines_are_as_far_apart_as_they_are_to_be():
    lines = ProgressLines(every=10.0, first=1.0)
    lines.phase("a")
    lines.close()
    lines._began = 0.0
    assert not lines._is_due(0.5), "a short phase"
    assert lines._is_due(1.5)
    lines._last = 1.5
    assert not lines._is_due(11.0)
    assert lines._is_due(11.6)
