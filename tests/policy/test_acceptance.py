"""Estimates of acceptance follow what trees had accepted, and begin as the scores say."""

import numpy as np
import pytest

from yggdrasil.policy.acceptance import AcceptanceCorrection, SurvivalCorrection

SURVIVAL = np.array([0.8, 0.6, 0.5, 0.0])


def test_scores_are_taken_as_they_are_at_first():
    assert AcceptanceCorrection().corrected(3.5) == 3.5
    assert AcceptanceCorrection().corrected(0.4) == 1.0  # the bonus token is certain


@pytest.mark.parametrize(("estimated", "accepted"), [(2.0, 3.0), (4.0, 1.0), (1.0, 0.0)])
def test_the_ratio_of_accepted_to_estimated_is_learned(estimated, accepted):
    correction = AcceptanceCorrection()
    for _ in range(300):
        correction.observe(estimated, accepted)
    assert correction.corrected(1.0 + estimated) == pytest.approx(1.0 + accepted, abs=0.15)


def test_a_change_of_text_is_followed():
    correction = AcceptanceCorrection()
    for accepted, count in ((3.0, 300), (1.5, 150)):
        for _ in range(count):
            correction.observe(3.0, accepted)
    assert correction.corrected(4.0) == pytest.approx(2.5, abs=0.2)


def test_what_is_not_tried_is_taken_as_it_is_again():
    correction, survival = AcceptanceCorrection(), SurvivalCorrection(4)
    for _ in range(100):
        correction.observe(4.0, 0.0)
        survival.observe(SURVIVAL.tolist(), 0)
    assert correction.corrected(5.0) < 1.2
    assert survival.corrected(SURVIVAL)[0] < 0.1
    for _ in range(400):
        correction.decay()
        survival.decay()
    assert correction.corrected(5.0) == pytest.approx(5.0, rel=0.02)
    np.testing.assert_allclose(survival.corrected(SURVIVAL), SURVIVAL, rtol=0.01)


def test_each_level_follows_what_it_had_accepted():
    """Two of three trees have two tokens accepted, the third none; a level that was not drafted keeps its share."""
    survival = SurvivalCorrection(4)
    np.testing.assert_allclose(survival.corrected(SURVIVAL), SURVIVAL)
    for _ in range(200):
        for accepted in (2, 2, 0):
            survival.observe(SURVIVAL[:2].tolist(), accepted)
    np.testing.assert_allclose(survival.corrected(SURVIVAL), [2 / 3, 2 / 3, 0.5, 0.0], atol=0.03)


def test_survival_never_rises_with_the_level():
    survival = SurvivalCorrection(4)
    for _ in range(200):
        survival.observe(SURVIVAL[:1].tolist(), 0)
    assert (np.diff(survival.corrected(SURVIVAL)) <= 0).all()


def test_what_was_learned_goes_on_from_its_state():
    for made, other, arguments in (
        (AcceptanceCorrection(), AcceptanceCorrection(), (3.0, 1.0)),
        (SurvivalCorrection(2), SurvivalCorrection(2), ([0.5, 0.3], 1)),
    ):
        made.observe(*arguments)
        other.restore(made.state())
        made.observe(*arguments)
        other.observe(*arguments)
        assert made.state() == other.state()
