"""What earlier requests left in the caches is kept up to the first differing token, and is what a fresh pass gives."""

import pytest
import torch
from test_cache_rows import Mixed, assert_rows_equal
from tiny_pair import TEXT, VOCAB_SIZE, cache_rows, chat_tokenizer, make_pair

from yggdrasil import SamplingParams, Speculation
from yggdrasil.drafters import Capabilities
from yggdrasil.drafters.model_free_options import NGramOptions
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.predictor.features import RepetitionFigures
from yggdrasil.tree.shape import TreeShape

PROMPT = TEXT[:21]
TREE = FixedPolicy(TreeShape(4, 4, 16))
SETTINGS = {
    "plain": (PLAIN_POLICY, {}),
    "tree": (TREE, {}),
    "mixed": (Mixed(), {}),
    "off": (TREE, {"speculation": False}),
    "sampling": (TREE, {"sampling": SamplingParams(temperature=1.0, seed=5)}),
    "log-probabilities": (TREE, {"sampling": SamplingParams(logprobs=2)}),
    "drawn": (TREE, {"sampling": SamplingParams(temperature=1.0, seed=5), "speculation": Speculation("sequoia")}),
    "k-ary": (TREE, {"speculation": Speculation(expansion=(2, 2, 1))}),
    "strict": (TREE, {"speculation": Speculation(exactness="strict", tolerance=1e9)}),
    "fixed width": (TREE, {"speculation": Speculation(exactness="fixed-width", fixed_width=8)}),
}
settings = pytest.mark.parametrize(("policy", "options"), SETTINGS.values(), ids=SETTINGS)


def assert_caches_are_fresh(pair, decoder):
    """Every row that a later request might keep is what one fresh pass over the text gives."""
    assembly = decoder.assembly
    for runner, model in ((assembly.target, pair.plain_target), (assembly.drafter, pair.plain_drafter)):
        if runner is None:
            continue
        kept = runner.text.shared([*runner.text.tokens, 0])
        if kept:
            assert_rows_equal(runner.cache, cache_rows(model, runner.text.tokens[:kept]), kept)


def as_fresh(pair, prompt, policy, options, count):
    return pair.decoder(policy).generate(prompt, max_new_tokens=count, **options).tokens


@settings
def test_a_second_turn_reads_only_what_is_new(pair, policy, options):
    decoder = pair.decoder(policy)
    first = decoder.generate(PROMPT, max_new_tokens=20, **options)
    assert first.metrics.reused_tokens == 0
    assert_caches_are_fresh(pair, decoder)

    prompt = [*PROMPT, *first.tokens, *TEXT[40:45]]
    second = decoder.generate(prompt, max_new_tokens=10, **options)
    assert len(prompt) - len(TEXT[40:45]) - 1 <= second.metrics.reused_tokens < len(prompt)
    assert second.tokens == as_fresh(pair, prompt, policy, options, 10)
    assert_caches_are_fresh(pair, decoder)


PARTS = {"tree": (0, 1, 13, 20, 21, 30), "sampling": (13, 20), "drawn": (21, 30), "plain": (0, 30)}


@pytest.mark.parametrize(("name", "shared"), [(name, shared) for name in SETTINGS for shared in PARTS.get(name, (30,))])
def test_a_text_that_parts_is_kept_so_far(pair, name, shared):
    policy, options = SETTINGS[name]
    decoder = pair.decoder(policy)
    first = decoder.generate(PROMPT, max_new_tokens=20, **options)
    text = [*PROMPT, *first.tokens]
    prompt = [*text[:shared], (text[shared] + 1) % VOCAB_SIZE, *TEXT[50:54]]
    second = decoder.generate(prompt, max_new_tokens=10, **options)

    assert second.metrics.reused_tokens == shared
    assert second.tokens == as_fresh(pair, prompt, policy, options, 10)
    assert_caches_are_fresh(pair, decoder)


def test_the_last_token_is_read_anew(pair):
    decoder = pair.decoder(TREE)
    first = decoder.generate(PROMPT, max_new_tokens=20)
    again = decoder.generate(PROMPT, max_new_tokens=20)

    assert again.tokens == first.tokens
    assert again.metrics.reused_tokens == len(PROMPT) - 1
    decoder.forget()
    assert decoder.generate(PROMPT, max_new_tokens=20).metrics.reused_tokens == 0
    assert decoder.generate(PROMPT[:1], max_new_tokens=4).metrics.reused_tokens == 0


def test_every_kind_of_request_follows_every_other(pair):
    """Draft model and host-driven drafter share one cache; both know what the other left there."""
    decoder = pair.decoder(TREE)
    text = list(PROMPT)
    for name in ("tree", "drawn", "tree", "off", "k-ary", "sampling", "tree", "strict"):
        _, options = SETTINGS[name]
        found = decoder.generate(text, max_new_tokens=12, **options)
        assert found.tokens == as_fresh(pair, text, TREE, options, 12)
        assert (found.metrics.reused_tokens > 0) == (text != list(PROMPT))
        assert_caches_are_fresh(pair, decoder)
        text += found.tokens


@settings
def test_after_a_request_that_was_cancelled(pair, policy, options):
    decoder = pair.decoder(policy)
    request = decoder.start(PROMPT, max_new_tokens=40, **options)
    for number, _ in enumerate(request):
        if number == 5:
            break
    cut = request.result()
    assert cut.finish_reason == "cancelled"
    assert cut.tokens == as_fresh(pair, PROMPT, policy, options, 40)[: len(cut.tokens)]
    assert_caches_are_fresh(pair, decoder)

    prompt = [*PROMPT, *cut.tokens, 7]
    after = decoder.generate(prompt, max_new_tokens=10, **options)
    assert after.metrics.reused_tokens >= len(PROMPT)
    assert after.tokens == as_fresh(pair, prompt, policy, options, 10)


def test_after_a_stop_in_the_middle_of_a_block(perfect_pair):
    """The cache holds accepted tokens behind the text's end; the next text goes on differently there."""
    chain = FixedPolicy(TreeShape(1, 4, 8))
    tokens = perfect_pair.reference(PROMPT, 30)
    for place in range(8, 14):
        decoder = perfect_pair.decoder(chain, eos=[tokens[place]])
        first = decoder.generate(PROMPT, max_new_tokens=30)
        prompt = [*PROMPT, *first.tokens, (tokens[len(first.tokens)] + 1) % VOCAB_SIZE, 5]
        second = decoder.generate(prompt, max_new_tokens=12, ignore_eos=True)

        assert second.metrics.reused_tokens in (len(prompt) - 2, len(prompt) - 3)
        assert second.tokens == perfect_pair.reference(prompt, 12)
        assert_caches_are_fresh(perfect_pair, decoder)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("stage", ["accept", "commit", "verify"])
@pytest.mark.parametrize("is_after", [False, True])
def test_after_an_error(pair, monkeypatch, error, stage, is_after):
    decoder = pair.decoder(TREE)
    target, calls = decoder.assembly.engine.target, []
    usual = getattr(target, stage)

    def broken(*arguments):
        calls.append(stage)
        if len(calls) == 4:
            if is_after:
                usual(*arguments)
            raise error
        return usual(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(target, stage, broken)
        request = decoder.start(PROMPT, max_new_tokens=40)
        with pytest.raises(error):
            list(request)
    assert_caches_are_fresh(pair, decoder)

    prompt = [*PROMPT, *request.result().tokens, 7, 8]
    after = decoder.generate(prompt, max_new_tokens=10)
    assert after.tokens == pair.reference(prompt, 10)
    assert (after.metrics.reused_tokens > len(PROMPT)) == (error is KeyboardInterrupt)


def test_rows_of_damaged_weights_are_not_kept():
    pair = make_pair()
    decoder = pair.decoder(TREE)
    weight = next(tensor for name, tensor in pair.target.tensors.items() if "down_proj" in name)
    healthy = weight.clone()
    decoder.generate(PROMPT, max_new_tokens=10)
    weight.fill_(float("nan"))
    with pytest.raises(YggdrasilError, match="not finite"):
        decoder.generate([*PROMPT, 5], max_new_tokens=10)
    weight.copy_(healthy)
    found = decoder.generate([*PROMPT, 5], max_new_tokens=10)

    assert found.metrics.reused_tokens == 0
    assert found.tokens == pair.reference([*PROMPT, 5], 10)


def state_of(drafter):
    pool = drafter._pool
    return pool._text, pool._start, pool._positions, pool._whole, pool._num_right, pool._num_guessed


@pytest.mark.parametrize("is_keep_all", [False, True])
def test_an_ngram_pool_goes_on_where_the_text_does(pair, is_keep_all):
    options = NGramOptions(is_keep_all=is_keep_all)
    drafter = NGramDrafter(options)
    decoder = pair.decoder(TREE, drafter=drafter)
    first = decoder.generate(PROMPT, max_new_tokens=30)
    positions = drafter._pool._positions
    prompt = [*PROMPT, *first.tokens, *TEXT[:9]]
    for changed in (prompt, [*prompt[:30], 3, *TEXT[:9]]):
        found = decoder.generate(changed, max_new_tokens=20)
        twin = NGramDrafter(options)
        fresh = pair.decoder(TREE, drafter=twin).generate(changed, max_new_tokens=20)

        assert found.tokens == fresh.tokens == pair.reference(changed, 20)
        assert found.metrics.accepted == fresh.metrics.accepted
        assert state_of(drafter) == state_of(twin)
        assert (drafter._pool._positions is positions) == (changed is prompt)  # kept, or begun anew


def test_what_repeats_is_remembered(pair):
    decoder = pair.decoder(Mixed())
    first = decoder.generate(PROMPT, max_new_tokens=20)
    figures = decoder.assembly.engine.target.figures
    for text in ([*PROMPT, *first.tokens], [*PROMPT, 4, *TEXT[:8]]):
        figures.extend(text[figures.resume(text) :])
        fresh = RepetitionFigures()
        fresh.extend(text)
        assert (figures.read() == fresh.read()).all()
        assert vars(figures.repetition) == vars(fresh.repetition)


class Reads:
    """A drafter that reads hidden states, and perhaps keeps them."""

    capabilities = Capabilities(layers=(-1,))
    name = "reads"

    def begin(self, tokens):
        self.begun = len(tokens)
        self.states = getattr(self, "states", [])[: len(tokens) - 1]
        self.tokens = list(tokens)

    def extend(self, tokens, states):
        self.tokens += tokens
        self.states += list(states[-1].clone())

    def cost(self, budget):
        return ()

    def propose(self, tree, budget):
        tree.attach(0, (self.tokens[-1] + 1) % VOCAB_SIZE, -0.5)


class Keeps(Reads):
    name = "keeps"

    def __init__(self):
        self.capabilities = Capabilities(layers=(-1,), num_kept=self._num_kept)

    def _num_kept(self, tokens):
        ours = getattr(self, "tokens", [])
        same = next((i for i, pair in enumerate(zip(ours, tokens, strict=False)) if pair[0] != pair[1]), None)
        return min(len(ours), len(tokens)) if same is None else same


@pytest.mark.parametrize("kind", [Reads, Keeps])
def test_a_drafter_of_states_has_one_for_every_token(pair, kind):
    part = kind()
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)), drafter=part)
    first = decoder.generate(PROMPT, max_new_tokens=15)
    prompt = [*PROMPT, *first.tokens[:9], *TEXT[30:36]]
    second = decoder.generate(prompt, max_new_tokens=10)
    fresh = kind()
    pair.decoder(FixedPolicy(TreeShape(2, 2, 4)), drafter=fresh).generate(prompt, max_new_tokens=10)

    assert (second.metrics.reused_tokens > len(PROMPT)) == (kind is Keeps)
    assert part.begun == second.metrics.reused_tokens + 1
    assert part.tokens == fresh.tokens
    torch.testing.assert_close(torch.stack(part.states), torch.stack(fresh.states), atol=1e-4, rtol=1e-4)


def test_turns_of_a_chat(pair):
    decoder = pair.decoder(TREE, eos=[0])
    decoder.tokenizer = chat_tokenizer()
    messages = [{"role": "user", "content": "Then on"}]
    first = decoder.chat(messages, max_new_tokens=25)
    assert first.tokens == pair.reference(chat_tokenizer()("u-Then on<end>a-")["input_ids"], 25)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and"}]
    tokens = decoder.encode_chat(messages)
    second = decoder.chat(messages, max_new_tokens=25)

    assert second.tokens == pair.reference(tokens, 25)
    assert second.metrics.reused_tokens > len(tokens) / 2
    assert "".join(decoder.stream_chat(messages, max_new_tokens=25)) == second.text
    assert_caches_are_fresh(pair, decoder)


def test_a_chat_needs_a_template(pair):
    with pytest.raises(YggdrasilError, match="no chat template"):
        pair.decoder(TREE).chat([{"role": "user", "content": "a"}])
