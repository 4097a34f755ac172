"""The settings that are measured beside what was chosen."""

from yggdrasil.export.costs import EngineCosts
from yggdrasil.export.exporting import Exported
from yggdrasil.export.playing import Foreseen
from yggdrasil.export.settings import ENGINES, Settings, plainly


def exported(options):
    settings = Settings("llama-server", options["--spec-type"], options, Foreseen(1.5, 6.0, 1.5))
    return Exported(settings, EngineCosts({1: 9.0, 2: 10.0}, {}), (), ())


def simple(match, draft):
    return {"--spec-type": "ngram-simple", "--spec-ngram-simple-size-n": match, "--spec-ngram-simple-size-m": draft}


def test_a_chosen_setting_is_measured_once_and_on_its_sets_alone():
    from check_export import SETS, _options, _ways

    new, of_the_grid = exported(simple(5, 6)), exported(simple(2, 4))
    none = Exported(plainly("llama-server", 9.0), new.costs, (), ())

    ways = _ways({"spec_bench": new, "c4": of_the_grid, "cnndm": new, "humaneval": none})

    options = [way.options for way in ways]
    assert len(set(options)) == len(options)
    assert next(way.sets for way in ways if way.options == _options(new)) == ("spec_bench", "cnndm")
    assert next(way for way in ways if way.options == _options(of_the_grid)).sets == tuple(SETS)


def test_the_grid_and_the_defaults_use_documented_options():
    from check_export import _ways

    for way in _ways({}):
        assert {part for part in way.options if part.startswith("--")} <= {*ENGINES["llama-server"].options}
