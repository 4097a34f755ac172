"""Timing iterations behind a long text reports how much of the text is prefilled."""

from dataclasses import replace
from functools import partial

import pytest
from tiny_pair import SHAPES, TEXT, byte_tokenizer

from yggdrasil.calibration.documents import open_ended_stream
from yggdrasil.calibration.measurement.iterations import READ, measure_reading, prefill_text
from yggdrasil.policy.fixed import PLAIN_POLICY

LONG = TEXT[:15]
STREAM = partial(open_ended_stream, byte_tokenizer(), 16)


@pytest.fixture
def assembly(pair):
    return pair.decoder(PLAIN_POLICY, replace(SHAPES, prefill_widths=(4,))).assembly


def test_a_text_that_is_prefilled_in_chunks_moves_the_progress_at_each(assembly):
    seen = []
    prefill_text(assembly, STREAM, LONG, seen.append)

    assert seen == pytest.approx([8 / 15, 12 / 15, 1.0, 1.0])
    again = []
    prefill_text(assembly, STREAM, LONG, again.append)
    assert again == [1.0], "the text is in the cache"


def test_reading_by_the_drafter_moves_the_progress_within_each_text(assembly):
    seen = []
    samples = measure_reading(assembly, STREAM, LONG, seen.append)

    assert len(samples) == READ
    assert seen == sorted(seen)
    assert len(set(seen)) >= 3 * READ
    assert seen[-1] == 1.0
