"""Plans on disk, what they refuse, and sources that can move with the package."""

from dataclasses import replace
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

import yggdrasil
from yggdrasil.artifacts import Machine, read_yaml, write_yaml
from yggdrasil.drafters.model_free_options import NGramOptions, StatisticsOptions
from yggdrasil.errors import ArtifactError, YggdrasilError
from yggdrasil.scheduling.plan import (
    KIND,
    SCHEMA_VERSION,
    Costs,
    Expectation,
    ModelRef,
    Plan,
    Shapes,
    check_plan,
    portable_source,
    resolve_source,
)
from yggdrasil.scheduling.stages import DEFAULT_ORDER

MACHINE = Machine("Some CPU", "26.2", "x86_64", ("avx2", "avx512f"), 2, 24, None, "Linux 6.1")
SHAPES = Shapes(
    max_length=300, draft_widths=(1, 4), max_depth=3, candidates=4, verify_widths=(1, 8), prefill_widths=(16,)
)


def made_up_plan(**changes):
    costs = [
        Costs(context, 0.123456789012345, {1: 0.1, 4: 0.3}, {1: 1.0, 8: 1.5}, 0.05, 1.1 + context)
        for context in (64, 1024)
    ]
    fields = {
        "name": "tiny",
        "machine": MACHINE,
        "versions": {"torch": "2.11.0", "yggdrasil": "0.1.0"},
        "dtype": "bfloat16",
        "target": ModelRef("owner/target", "0123abcd", 2),
        "drafters": [ModelRef("yggdrasil:assets/tiny/drafter", "89abcdef", 1), StatisticsOptions(table=False)],
        "tokenizer": "feedf00d",
        "shapes": SHAPES,
        "stages": DEFAULT_ORDER,
        "objective": "latency",
        "depth_from": "predictor",
        "predictor": "../predictors/tiny",
        "costs": costs,
        "predicted": Expectation("predictor", 3.25, 0.7, 2.1),
        "rejected": [Expectation("fixed 4x3", 2.9, 0.9, 1.7)],
    }
    return Plan(**{**fields, **changes})


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plans" / "tiny" / "here.yaml"
    made_up_plan().save(path)
    return path


def test_round_trip(plan_file):
    assert Plan.load(plan_file) == made_up_plan()
    assert Plan.load(plan_file).costs[1].steps().draft_ms == {1: 0.1, 4: 0.3}


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("max_lenght",), 3, "unknown key 'max_lenght'"),
        (("shapes", "verify_width"), [1], "unknown key 'shapes.verify_width' .did you mean 'verify_widths'"),
        (("dtype",), "int8", "key 'dtype'"),
        (("stages",), list(DEFAULT_ORDER[::-1]), "the stage 'bookkeeping' runs before"),
        (("costs",), [], "costs is empty"),
        (("draft_vocabulary",), 0, "draft_vocabulary is 0, which no drafter has"),
        (("shapes", "candidates"), 3, r"candidates \(3\) must reach the widest draft width, 4"),
        (("shapes", "candidates"), 0, r"candidates \(0\) must be 1 or more"),
        (("shapes", "spare_nodes"), -1, r"spare_nodes \(-1\) 0 or more"),
        (("costs", 0, "context"), -1, "costs are given for a context of -1 tokens"),
        (("shapes", "verify_widths"), [1, 8, 16], r"costs at context 64 are for verify widths \[1, 8\]"),
        (("shapes", "draft_widths"), [4, 1], r"draft_widths must be ascending, distinct and at least 1, got \[4, 1\]"),
    ],
)
def test_a_wrong_value_is_named_with_its_file(plan_file, path, value, sentence):
    """Written with a right checksum, so only the content is at fault."""
    content = read_yaml(plan_file, KIND, SCHEMA_VERSION)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    write_yaml(plan_file, KIND, SCHEMA_VERSION, content)

    with pytest.raises(ArtifactError, match=rf"here.yaml.*{sentence}"):
        Plan.load(plan_file)


def test_a_missing_plan_and_a_future_one(tmp_path, plan_file):
    with pytest.raises(ArtifactError, match=r"nowhere\.yaml"):
        Plan.load(tmp_path / "nowhere.yaml")
    write_yaml(plan_file, KIND, SCHEMA_VERSION + 1, read_yaml(plan_file, KIND, SCHEMA_VERSION))
    with pytest.raises(ArtifactError, match=r"here\.yaml"):
        Plan.load(plan_file)


# ==== machines ====


def test_the_machine_of_the_plan_is_served():
    """Also with other memory and another kernel: no timing depends on them."""
    check_plan(made_up_plan(), MACHINE, force_machine=False)
    check_plan(made_up_plan(), replace(MACHINE, memory_gib=7, os="Linux 9"), force_machine=False)


@pytest.mark.parametrize("change", [{"cores": 4}, {"cpu": "Other CPU"}, {"isa": ("avx2",)}, {"accelerator": "GPU"}])
def test_another_machine_is_refused_unless_forced(change):
    other = replace(MACHINE, **change)

    with pytest.raises(YggdrasilError, match=r"plan tiny was calibrated on Some CPU .*calibrate here.*--force-machine"):
        check_plan(made_up_plan(), other, force_machine=False)
    check_plan(made_up_plan(), other, force_machine=True)


# ==== shapes ====


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"verify_widths": ()}, r"verify_widths must be ascending.*got \[\]"),
        ({"verify_widths": (0, 1)}, "verify_widths must be ascending"),
        ({"prefill_widths": (8, 8)}, "prefill_widths must be ascending"),
        ({"max_depth": 0}, r"max_depth \(0\) must be 1 to 1024"),
        ({"max_depth": 10**30}, r"max_depth \(10+\) must be 1 to 1024"),
        ({"max_length": 1}, r"max_length \(1\) 2 or more"),
    ],
)
def test_shapes_that_make_no_sense(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(SHAPES, **change)


widths = st.sets(st.integers(1, 64), min_size=1, max_size=4).map(sorted).map(tuple)


@examples(200)
@given(widths, st.integers(1, 16), widths, widths, st.integers(2, 4096))
def test_the_cache_holds_every_step_of_the_longest_text(draft_widths, depth, verify_widths, prefill_widths, length):
    """The last position a root can have, and behind it each step's rows at the slot where that step writes them."""
    shapes = Shapes(length, draft_widths, depth, draft_widths[-1], verify_widths, prefill_widths)
    last_root = length - 1
    written = [last_root + width for width in verify_widths]
    written += [last_root + 1 + depth * width for width in draft_widths]
    written += [length - 1 + width for width in prefill_widths]  # a last chunk of one token, padded
    written.append(last_root + depth + 1)  # the head step, padded

    assert shapes.cache_capacity >= max(written)
    assert shapes.num_nodes >= max(1 + depth * draft_widths[-1], verify_widths[-1])


# ==== sources ====


def test_sources_inside_the_package_move_with_it():
    inside = Path(yggdrasil.__file__).parent / "assets"
    source = portable_source(str(inside / ".." / "assets"))

    assert source == "yggdrasil:assets"
    assert Path(resolve_source(source)) == inside


def test_other_folders_stay_where_they_are(tmp_path, monkeypatch):
    folder = tmp_path / "yggdrasil" / "model"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder.parent)

    assert portable_source("model") == str(folder.resolve())
    assert resolve_source(str(folder)) == str(folder)


def test_hub_ids_are_kept():
    assert portable_source("owner/name") == resolve_source("owner/name") == "owner/name"
    assert ModelRef("owner/name", "", 1).path() == "owner/name"


COUNTS = StatisticsOptions()


MODEL = ModelRef("m", "1", 1)


@pytest.mark.parametrize(
    "drafters", [[COUNTS, COUNTS], [NGramOptions(), NGramOptions()], [COUNTS, MODEL], [MODEL, MODEL]]
)
def test_drafters_are_at_most_one_model_and_one_of_each_other_kind(drafters):
    with pytest.raises(ValueError, match="drafters"):
        made_up_plan(drafters=drafters)


def test_a_model_drafts_in_some_width():
    shapes = replace(made_up_plan().shapes, draft_widths=())
    assert made_up_plan(drafters=[COUNTS], shapes=shapes).shapes.num_nodes == shapes.verify_widths[-1]
    with pytest.raises(ValueError, match="draft_widths is empty"):
        made_up_plan(drafters=[MODEL], shapes=shapes)


def test_what_guesses_beside_the_drafter_is_named():
    for drafter in (None, MODEL):
        for free in ((), (COUNTS,), (NGramOptions(), COUNTS)):
            plan = made_up_plan(drafters=[*([drafter] if drafter else []), *free])
            assert (plan.drafter, plan.model_free) == (drafter, free)
