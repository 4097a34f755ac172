"""The script that times second turns over recurrent layers."""

import hybrid_turns
import pytest
from recurrent_models import recurrent_model

from yggdrasil.native import is_native


@pytest.mark.skipif(not is_native(), reason="no C++ compiler on this machine")
def test_a_second_turn_reads_its_answer_and_what_is_new():
    loaded = recurrent_model("lfm2").loaded
    read, second, short = hybrid_turns.measure(hybrid_turns.decoder_of(loaded), loaded.vocab_size, 200, 1)

    assert hybrid_turns.NEW < read <= hybrid_turns.NEW + hybrid_turns.ANSWER + 1
    assert second > 0
    assert short > 0
