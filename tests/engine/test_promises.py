"""Promises follow what came of earlier ones, and start at what the scores say."""

import numpy as np
import pytest

from yggdrasil.engine.promises import KeptPromises, KeptSurvival, Paces


def test_scores_are_believed_at_first():
    assert KeptPromises().honest([3.5, 2.0]) == [3.5, 2.0]
    assert KeptPromises().honest([0.4]) == [1.0]  # the bonus is certain


@pytest.mark.parametrize(("promised", "accepted"), [(2.0, 3.0), (4.0, 1.0), (1.0, 0.0)])
def test_the_ratio_of_kept_to_promised_is_learned(promised, accepted):
    promises = KeptPromises()
    for _ in range(300):
        promises.observe(promised, accepted)
    assert promises.honest([1.0 + promised]) == [pytest.approx(1.0 + accepted, abs=0.15)]


def test_a_change_of_text_is_followed():
    promises = KeptPromises()
    for _ in range(300):
        promises.observe(3.0, 3.0)
    for _ in range(150):
        promises.observe(3.0, 1.5)
    assert promises.honest([4.0]) == [pytest.approx(2.5, abs=0.2)]


def test_paces_of_plain_steps_and_trees_are_apart():
    paces = Paces()
    for _ in range(100):
        paces.follow_tree(2.0 * paces.tree, 5.0)
    assert paces.plain == 1.0
    assert paces.tree == pytest.approx(2.5, rel=0.01)


def test_what_is_not_tried_is_believed_as_calibrated_again():
    paces = Paces()
    for _ in range(100):
        paces.follow_tree(2.0 * paces.tree, 5.0)
    for _ in range(600):
        paces.follow_plain(1.0 * paces.plain, 1.5)
    assert paces.plain == pytest.approx(1.5, rel=0.01)
    assert paces.tree == pytest.approx(1.5, rel=0.02)


def test_a_pause_of_the_machine_is_not_its_pace():
    paces = Paces()
    paces.follow_tree(1.0, 10_000.0)
    assert paces.tree < 1.3


SURVIVAL = np.array([0.8, 0.6, 0.5, 0.0])


def test_survival_is_believed_at_first():
    np.testing.assert_allclose(KeptSurvival(4).honest(SURVIVAL), SURVIVAL)


def test_each_level_follows_what_it_kept():
    """Two of three trees accept two tokens, the third none; a level beyond the drafted ones keeps its share of them."""
    kept = KeptSurvival(4)
    for _ in range(200):
        for accepted in (2, 2, 0):
            kept.observe(SURVIVAL[:2], accepted)

    np.testing.assert_allclose(kept.honest(SURVIVAL), [2 / 3, 2 / 3, 0.5, 0.0], atol=0.03)


def test_survival_never_rises_with_the_level():
    """Nothing is known of the second level but that the first, which is always refused, comes before it."""
    kept = KeptSurvival(4)
    for _ in range(200):
        kept.observe(SURVIVAL[:1], 0)

    honest = kept.honest(SURVIVAL)
    assert honest[0] < 0.1
    assert (np.diff(honest) <= 0).all()


def test_what_a_shape_does_not_promise_is_no_failure():
    """A narrow pass that promises half of each level, and keeps it, changes nothing."""
    kept = KeptSurvival(4)
    for accepted in (2, 0) * 100:
        kept.observe(np.array([0.5, 0.5]), accepted)

    np.testing.assert_allclose(kept.honest(SURVIVAL), SURVIVAL, atol=0.02)


def test_survival_that_is_not_tried_is_believed_as_calibrated_again():
    kept = KeptSurvival(4)
    for _ in range(100):
        kept.observe(SURVIVAL, 0)
    for _ in range(400):
        kept.forget()

    np.testing.assert_allclose(kept.honest(SURVIVAL), SURVIVAL, rtol=0.01)


def test_promises_that_are_not_tried_are_believed_again():
    promises = KeptPromises()
    for _ in range(100):
        promises.observe(4.0, 0.0)
    distrusted = promises.honest([5.0])[0]
    for _ in range(400):
        promises.forget()

    assert distrusted < 1.2
    assert promises.honest([5.0]) == [pytest.approx(5.0, rel=0.02)]


def test_free_trees_pace_follows_the_trees_where_none_is_tried():
    paces = Paces()
    for _ in range(10):
        paces.follow_free(paces.free, 3.0 * paces.free)
    slow = paces.free
    for _ in range(500):
        paces.follow_tree(paces.tree, 1.0)

    assert slow > 5.0
    assert paces.free == pytest.approx(1.0, rel=0.1)


def test_of_a_machine_that_is_faster_again_drafted_trees_are_believed_faster_too():
    """Both took twice as long while it was slow; now only free ones are tried, and take what was calibrated."""
    paces = Paces()
    for _ in range(100):
        paces.follow_tree(paces.tree, 2.0)
        paces.follow_free(paces.free, 2.0)
    for _ in range(50):
        paces.follow_free(paces.free, 1.0)

    assert paces.free == pytest.approx(1.0, rel=0.02)
    assert paces.tree < 1.3
    assert paces.plain == 1.0


def test_trees_that_differ_keep_paces_of_their_own():
    paces = Paces()
    for _ in range(200):
        paces.follow_tree(paces.tree, 1.2)
        paces.follow_free(paces.free, 0.8)

    assert paces.tree == pytest.approx(1.2, rel=0.05)
    assert paces.free == pytest.approx(0.8, rel=0.05)


def test_the_first_warm_plain_step_tells_how_fast_the_machine_is():
    """Eight times slower than calibrated, as beside other work: trees are not blamed for that."""
    paces = Paces()
    paces.follow_plain(1.0, 20.0, is_cold=True)
    assert (paces.plain, paces.tree, paces.free) == (1.0, 1.0, 1.0)
    paces.follow_plain(1.0, 8.0)
    assert (paces.plain, paces.tree, paces.free) == (8.0, 8.0, 8.0)
    paces.follow_plain(8.0, 10_000.0)
    assert paces.plain < 12.0
