"""A head drafts for hybrids and mixtures as well; it reads the states of their layers."""

import pytest
from examples import ALL
from head_files import eagle_config, published_tensors, write_head
from mixtures import MIXTURES, mixture_model
from recurrent_models import RECURRENT, recurrent_model
from tiny_pair import TEXT, VOCAB_SIZE

from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.tree.shape import TreeShape

PROMPT = TEXT[:21]
MODELS = dict.fromkeys(RECURRENT, recurrent_model) | dict.fromkeys(MIXTURES, mixture_model)


@pytest.mark.parametrize("family", MODELS if ALL else ["lfm2", "falcon_h1", "gpt_oss", "gemma4"])
def test_a_head_drafts_and_no_token_changes(family, tmp_path):
    model = MODELS[family](family)
    config = eagle_config(VOCAB_SIZE, hidden_size=64, intermediate_size=96, head_dim=16)
    head = load_head(write_head(tmp_path, config, published_tensors(config)), model.loaded, 1)
    decoder = model.decoder(FixedPolicy(TreeShape(2, 3, 8)), head)
    found = decoder.generate(PROMPT, max_new_tokens=20)

    assert found.tokens == model.reference(PROMPT, 20)
    assert found.metrics.draft_widths.get(2, 0) > 5
    later = [*PROMPT, *found.tokens, *TEXT[40:45]]
    assert decoder.generate(later, max_new_tokens=10).tokens == model.reference(later, 10)
