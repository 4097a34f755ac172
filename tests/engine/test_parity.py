"""The parity probe sees what really differs, and nothing where bits are equal; a divergence is a tie or a fault."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from tiny_pair import TEXT, make_pair, random_model
from torch import nn

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.speculation import DEFAULT, OFF, Speculation
from yggdrasil.bench.divergence import first_divergence, judge_divergence
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.parity import ProbeText, measure_parity
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.parity import ParityReport, read_tolerance
from yggdrasil.tree.shape import TreeShape

TEXTS = [ProbeText("a", TEXT[:12]), ProbeText("b", TEXT[20:29])]
EGT = FixedPolicy(TreeShape(2, 3, 8))


class WidthBound(nn.Module):
    """A linear layer whose sums depend on how many rows come together, as many libraries' do, only more."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        return output if x.shape[-2] == 1 else output * 1.02


@pytest.fixture(scope="module")
def uneven() -> Decoder:
    """A pair whose target computes a wide pass a little otherwise than a narrow one."""
    pair = make_pair()
    target = random_model()
    for layer in target.model.layers:
        layer.mlp.down_proj = WidthBound(layer.mlp.down_proj)
    return pair._replace(target=prepare_model(target, "uneven", 1)).decoder(EGT, backend="eager")


def test_more_tokens_than_the_context_holds_are_refused():
    """A pass behind its end is a fault of an operator, or of memory."""
    decoder = make_pair().decoder(EGT)
    longest = decoder.assembly.engine.max_length - len(TEXTS[1].tokens)

    measure_parity(decoder.assembly, TEXTS[1:], longest)
    with pytest.raises(YggdrasilError, match=rf"^--max-new-tokens {longest + 1} does not fit behind a prompt of 9"):
        measure_parity(decoder.assembly, TEXTS[1:], longest + 1)


def test_row_invariant_kernels_have_tolerance_zero():
    """The native kernels' promise, in bfloat16: a row has the same bits whatever travels with it."""
    pytest.importorskip("yggdrasil.native")
    from yggdrasil.native import is_native

    if not is_native():
        pytest.skip("no native kernels on this machine")
    decoder = make_pair(dtype=torch.bfloat16).decoder(EGT)
    report, found = measure_parity(decoder.assembly, TEXTS[:1], 12)

    assert found == []
    assert report.tolerance == 0
    assert report.worst == []
    assert [(width.width, width.positions) for width in report.widths] == [(2, 12), (4, 12), (8, 12), (16, 12)]


def test_the_probe_sees_uneven_kernels(uneven, tmp_path):
    progress = []
    report, found = measure_parity(uneven.assembly, TEXTS, 16, progress.append)

    assert progress[-1] == 1.0
    assert all(width.largest_difference > 0 for width in report.widths)
    assert report.tolerance >= 2 * max(width.largest_difference for width in report.widths)
    assert all(max(flip.expected_margin, flip.found_margin) < report.tolerance for flip in found)
    assert len(found) == sum(width.flips for width in report.widths)
    # The first layer's attention reads the same input; what differs starts behind its own uneven linear.
    assert [layer.layer for layer in report.worst] == [0, 1]
    assert 0 < report.worst[0].relative < 0.03
    assert found
    json.dumps([asdict(flip) for flip in found])

    report.save(tmp_path)
    replace(report, dtype="float16", tolerance=9.0).save(tmp_path)
    assert ParityReport.load(tmp_path, "float32") == report, "each arithmetic has a tolerance of its own"
    assert read_tolerance(tmp_path, "float32") == report.tolerance
    assert read_tolerance(tmp_path, "float16") == 9.0
    assert read_tolerance(tmp_path, "bfloat16") is None
    assert read_tolerance(tmp_path / "nowhere", "float32") is None


def test_strict_is_width_one_decoding_on_uneven_kernels(uneven):
    """The tolerance that the probe gives is enough beyond the tokens it has seen, and without it the output drifts."""
    report, _ = measure_parity(uneven.assembly, TEXTS, 24)
    strict = Speculation(exactness="strict", tolerance=report.tolerance)
    runs = [
        [uneven.generate(prompt, max_new_tokens=32, speculation=way) for prompt in (TEXT[:12], TEXT[20:29])]
        for way in (OFF, DEFAULT, strict)
    ]
    plain, fast, exact = ([run.tokens for run in way] for way in runs)

    assert plain == exact != fast
    assert sum(run.metrics.decoding.flips for run in runs[2]) > 0
    assert all(run.metrics.aal > 1 for run in runs[2])


def test_portable_linears_differ_by_width():
    """Not made up: unpacked bfloat16 linears of PyTorch, where its library sums otherwise for other widths."""
    pair = make_pair(dtype=torch.bfloat16, hidden_size=256, intermediate_size=512)
    model = random_model(hidden_size=256, intermediate_size=512).to(torch.bfloat16)
    decoder = pair._replace(target=prepare_model(model, "unpacked", 1, pack=False)).decoder(EGT, backend="eager")
    report, _ = measure_parity(decoder.assembly, TEXTS, 16)
    if report.tolerance == 0:
        pytest.skip("PyTorch's linears are row-invariant on this machine")

    assert report.worst


def test_first_divergence():
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 5, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == 2


def test_a_divergence_is_a_tie_or_a_fault(pair):
    decoder = pair.decoder(EGT)
    prompt = TEXT[:20]
    plain = decoder.generate(prompt, max_new_tokens=8, speculation=False).tokens
    second = (
        decoder.generate(prompt, max_new_tokens=8, speculation=False, sampling=SamplingParams(logprobs=2))
        .logprobs[3]
        .top
    )
    (best, value), (other, lower) = second[:2]
    tree = [*plain[:3], other, *plain[4:]]
    assert plain[3] == best
    assert judge_divergence(decoder, prompt, plain, plain) is None

    decoder.tolerance = (value - lower) * 1.01
    tie = judge_divergence(decoder, prompt, plain, tree)
    decoder.tolerance = (value - lower) * 0.99
    fault = judge_divergence(decoder, prompt, plain, tree)

    assert (tie.position, tie.plain_token, tie.tree_token, tie.replayed_token) == (3, best, other, best)
    assert tie.margin == pytest.approx(value - lower, rel=1e-3)
    assert (tie.verdict, fault.verdict) == ("tie", "fault")
    assert judge_divergence(decoder, prompt, plain, plain[:5]).verdict == "fault"


def test_captured_steps_judge_a_divergence_too(pair):
    decoder = pair.decoder(EGT, backend="cudagraph")
    prompt = TEXT[:20]
    plain = decoder.generate(prompt, max_new_tokens=8, speculation=False).tokens
    wrong = [*plain[:3], plain[3] + 1, *plain[4:]]

    assert judge_divergence(decoder, prompt, plain, plain) is None
    found = judge_divergence(decoder, prompt, plain, wrong)
    assert (found.position, found.plain_token, found.tree_token, found.verdict) == (3, plain[3], wrong[3], "fault")
