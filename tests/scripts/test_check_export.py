"""The settings that are measured beside what was chosen."""

from bench_systems import Continuation, Sample

from yggdrasil.export.costs import EngineCosts
from yggdrasil.export.exporting import Exported
from yggdrasil.export.playing import Prediction
from yggdrasil.export.settings import ENGINES, Settings, plain_settings


def exported(options):
    settings = Settings("llama-server", options["--spec-type"], options, Prediction(1.5, 6.0, 1.5))
    return Exported(settings, EngineCosts({1: 9.0, 2: 10.0}, {}), (), ())


def simple(match, draft):
    return {"--spec-type": "ngram-simple", "--spec-ngram-simple-size-n": match, "--spec-ngram-simple-size-m": draft}


def test_a_chosen_setting_is_measured_once_and_on_its_sets_alone():
    from check_export import SETS, _options, _ways

    new, of_the_grid = exported(simple(5, 6)), exported(simple(2, 4))
    none = Exported(plain_settings("llama-server", 9.0), new.costs, (), ())

    ways = _ways({"spec_bench": new, "c4": of_the_grid, "cnndm": new, "humaneval": none})

    options = [way.options for way in ways]
    assert len(set(options)) == len(options)
    assert next(way.sets for way in ways if way.options == _options(new)) == ("spec_bench", "cnndm")
    assert next(way for way in ways if way.options == _options(of_the_grid)).sets == tuple(SETS)


def test_the_grid_and_the_defaults_use_documented_options():
    from check_export import _ways

    for way in _ways({}):
        assert {part for part in way.options if part.startswith("--")} <= {*ENGINES["llama-server"].options}


def test_the_fastest_round_counts():
    from check_export import _ROUND, _fastest

    def sample(prompt, system, number, ms):
        return Sample(f"{prompt}{_ROUND}{number}", system, Continuation([1, 2], 1.0, ms, 1, 1), 0)

    times = {("a, round 7", "none"): (3.0, 2.0), ("a, round 7", "x"): (1.0, 4.0), ("b", "x"): (5.0, 6.0)}
    samples = [sample(*name, i, each[i]) for i in (0, 1) for name, each in times.items()]

    assert {(each.prompt, each.system): each.continuation.tpot_ms for each in _fastest(samples)} == {
        name: min(each) for name, each in times.items()
    }


def test_what_is_chosen_and_the_fastest_of_each_set_go_on():
    from check_export import DEFAULTS, FINALISTS, SETS, _finalists, _ways

    ways = _ways({"spec_bench": exported(simple(5, 6)), "c4": exported(simple(2, 4))})
    grid = [way.name for way in ways if way.name.startswith("ngram")]
    slower = {name: 1.5 + i / 10 for i, name in enumerate(DEFAULTS)}  # the first is the fastest
    times = {name: 2.0 + i / 10 for i, name in enumerate(grid)}  # and here too
    found = {name: {"none": 2.0, **slower, **times, grid[-1]: 1.0} for name in SETS}
    found["spec_bench"] = {"none": 2.0, "export spec_bench": 1.0, **slower, **times}

    kept = {name: {way.name for way in _finalists(ways, found) if name in way.sets} for name in found}

    default = next(iter(DEFAULTS))
    assert kept["spec_bench"] == {"export spec_bench", default, *grid[:FINALISTS]}
    assert kept["c4"] == {default, grid[-1], *grid[: FINALISTS - 1]}
    assert all(way.sets for way in _finalists(ways, found))
