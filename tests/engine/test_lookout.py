"""When a pass is asked to be narrow so that it tells how slow memory is."""

from yggdrasil.engine.lookout import Lookout
from yggdrasil.tree.step_costs import StepCosts


def costs(**verify_ms):
    return StepCosts(0.0, {}, {int(width[1:]): ms for width, ms in verify_ms.items()}, 0.2, verify_ms["w1"])


READING = costs(w1=20.0, w2=20.1, w4=20.4, w8=21.0, w16=30.0, w32=60.0)
COMPUTING = costs(w1=20.0, w2=24.0, w4=40.0)


def asked(lookout, width, place=0, count=100):
    """After how many passes of ``width`` one is asked to be narrower, and how narrow."""
    for number in range(count):
        if (widest := lookout.widest(place)) is not None:
            return number, widest
        lookout.passed(place, width)
    return None


def test_the_widest_pass_that_waits_for_memory_is_asked_for_after_a_while():
    lookout = Lookout([READING])
    number, width = asked(lookout, 16)

    assert 16 <= number <= 64
    assert width == 8
    assert lookout.widest(0) == 8, "until one came"
    lookout.passed(0, 4)
    assert asked(lookout, 32) == (number, 8)


def test_passes_that_tell_are_enough():
    assert asked(Lookout([READING]), 8) is None
    assert asked(Lookout([READING]), 1) is None


def test_where_no_tree_waits_for_memory_none_is_asked_for():
    assert asked(Lookout([COMPUTING]), 4) is None
    assert asked(Lookout([costs(w1=20.0)]), 1) is None


def test_other_places_and_costs_have_their_own_widths():
    lookout = Lookout([READING, COMPUTING])
    assert asked(lookout, 32)
    assert lookout.widest(1) is None
    lookout.use([READING.where_memory_is(0.8), COMPUTING])
    assert lookout.widest(0) == 4


def test_a_pass_that_waits_for_memory_only_where_that_is_slow_does_not_tell():
    """Believed slow while it was not, 32 rows took as long as ever, and were verified for hundreds of passes."""
    calibrated = costs(w1=81.4, w2=83.0, w8=85.2, w16=86.7, w32=112.1)
    slow = calibrated.where_memory_is(1.8)
    assert asked(Lookout([slow]), 32) is None
    lookout = Lookout([calibrated])
    lookout.use([slow])

    assert asked(lookout, 32)[1] == 16
