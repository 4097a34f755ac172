"""The plan beside plain decoding: figures of all prompts, and of each category of a file that has several."""

from tiny_pair import TEXT

from yggdrasil.bench.compare import compare, summarise, summarise_categories
from yggdrasil.engine.policy import FixedPolicy
from yggdrasil.prompts import Prompt
from yggdrasil.tree.objective import TreeShape


def prompt_of(pair, name, first, category):
    tokenizer = pair.decoder(FixedPolicy(TreeShape(2, 2, 4))).tokenizer
    return Prompt(name, tokenizer.decode(TEXT[first : first + 9]), category)


def test_categories_have_figures_of_their_own(pair):
    prompts = [prompt_of(pair, "a", 0, "qa"), prompt_of(pair, "b", 9, None), prompt_of(pair, "c", 20, "qa")]
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    results = compare(decoder, prompts, 8, lambda _: None, warm_up=False)
    found = summarise_categories(results)

    assert list(found) == ["qa", "none"]
    assert found["qa"] == summarise([results[0], results[2]])
    assert (found["qa"]["prompts"], found["none"]["prompts"]) == (2, 1)
    assert found["qa"]["matched"] == 2


def test_one_category_is_no_breakdown(pair):
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    results = compare(decoder, [prompt_of(pair, "a", 0, "qa")], 4, lambda _: None, warm_up=False)

    assert summarise_categories(results) == {}
