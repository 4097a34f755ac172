"""Progress without a terminal: lines now and then, from phases that take a while, also where they compute silently."""

import threading
import time
from dataclasses import replace

from tiny_pair import SHAPES, TEXT

from yggdrasil.cli.progress import ProgressLines, show_categories, with_progress
from yggdrasil.policy.fixed import PLAIN_POLICY


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


def test_reading_a_long_prompt_writes_lines_until_text_begins(pair, monkeypatch, capsys):
    """Lines tell how much is read; none follows the first token."""
    monkeypatch.setattr("yggdrasil.cli.progress.ProgressLines", _AtOnce)
    decoder = pair.decoder(PLAIN_POLICY, replace(SHAPES, prefill_widths=(4,)))
    request, lines = decoder.start(TEXT[:15], max_new_tokens=8), []
    for _ in with_progress(request):
        lines.append(capsys.readouterr().err)

    said = [line.strip() for line in lines if line]
    assert said == [f"yggdrasil: reading the prompt: 0 s, {part}%" for part in (27, 53, 80, 100)]
    assert len(request.tokens) == 8


class _AtOnce(ProgressLines):
    """Writes a line at each report, without a thread, while a phase lasts."""

    def phase(self, title):
        self._title, self._is_open = title, True

        def report(fraction):
            self._fraction = fraction
            if self._is_open:
                self._write(0.0)

        return report

    def close(self):
        self._is_open = False


def test_a_table_of_categories_is_not_cut_in_a_pipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    speedup = {"median": 1.67, "low": 1.06, "high": 2.29}
    summary = {"matched": 4, "prompts": 4, "aal": 1.7, "baseline_tpot_ms": 15.7, "tpot_ms": 10.9, "speedup": speedup}
    show_categories({"multi-turn conversation": {**summary, "total_speedup": 1.44, "repeats": 0.34}})

    written = capsys.readouterr().out
    assert "speed-up (quartiles)" in written
    assert "multi-turn conversation" in written
    assert "1.67 (1.06 to 2.29)" in written
