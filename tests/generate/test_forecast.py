"""The answer-length forecast: Kaplan-Meier, censoring, conditional moments, state."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.generate.forecast import EDGES, LengthForecast

CAP = 10_240
# Lengths up to here have a bin of their own, so the grid is exact.
EXACT = 40

small_lengths = st.lists(st.integers(1, EXACT), min_size=1, max_size=30)
lengths = st.lists(st.integers(1, 20_000), max_size=50)


def without_prior() -> LengthForecast:
    return LengthForecast(prior_answers=1e-9)


def observe_all(forecast: LengthForecast, completion_tokens, cap: int = CAP) -> LengthForecast:
    for tokens in completion_tokens:
        forecast.observe(min(tokens, cap), max_new_tokens=cap)
    return forecast


def brute_force_survival(events: list[int], censored: list[int], at: int) -> float:
    survival = 1.0
    for t in sorted(set(events)):
        if t >= at:
            break
        at_risk = sum(x >= t for x in events) + sum(x >= t for x in censored)
        survival *= 1 - events.count(t) / at_risk
    return survival


@given(events=small_lengths, censored=st.lists(st.integers(1, EXACT), max_size=30))
def test_survival_is_kaplan_meier(events, censored):
    """The curve equals Kaplan-Meier by hand, with answers in flight as censored observations."""
    curve = observe_all(without_prior(), events).fit(censored)
    known = max(events + censored)
    for edge, survival in zip(EDGES, curve.survival, strict=True):
        if edge <= known:
            assert survival == pytest.approx(brute_force_survival(events, censored, int(edge)), abs=1e-6)


@given(events=small_lengths, cap=st.integers(2, EXACT))
def test_an_answer_at_its_cap_is_censored(events, cap):
    """Answers that stopped at the cap count as still running just below it."""
    curve = observe_all(without_prior(), events, cap).fit()
    ended = [x for x in events if x < cap]
    capped = [cap - 1] * (len(events) - len(ended))
    expected = brute_force_survival(ended, capped, cap)
    assert np.interp(cap, EDGES, curve.survival) == pytest.approx(expected, abs=1e-6)


@given(tokens=st.lists(st.integers(1, EXACT), min_size=2, max_size=30), done=st.integers(0, EXACT - 1))
def test_conditional_moments_are_those_of_the_longer_answers(tokens, done):
    """Given progress, mean and variance are those of the finished answers that are longer."""
    longer = [x for x in tokens if x > done]
    if not longer:
        return
    mean, variance = observe_all(without_prior(), tokens).fit().mean_and_variance([done], [100])
    assert mean[0] == pytest.approx(np.mean(longer), rel=1e-4)
    assert variance[0] == pytest.approx(np.var(longer), rel=1e-3, abs=1e-2)


@given(
    tokens=lengths,
    progress=st.lists(st.floats(0, 30_000), min_size=1, max_size=20),
    cap=st.integers(1, 16_384),
)
def test_a_final_length_lies_between_progress_and_cap(tokens, progress, cap):
    """No conditional mean is below the progress or above the cap, and it grows with the progress."""
    known = np.minimum(np.sort(progress), cap)
    mean, variance = (
        observe_all(LengthForecast(), tokens).fit(known).mean_and_variance(known, [cap] * len(known))
    )
    assert (mean >= known - 1e-6).all()
    assert (mean <= cap + 1e-6).all()
    assert (variance >= 0).all()
    assert (np.diff(mean) >= -1e-3 * mean[1:]).all()


@given(tokens=lengths, done=st.floats(0, 5_000), cap=st.integers(5_000, 9_000))
def test_a_higher_cap_never_lowers_the_mean(tokens, done, cap):
    """Each request keeps its own cap, whatever the caps of the answers that taught the curve."""
    curve = observe_all(LengthForecast(), tokens).fit()
    mean, _ = curve.mean_and_variance([done, done], [cap, 2 * cap])
    assert mean[1] >= mean[0] - 1e-6


def test_the_mean_of_many_answers_is_found():
    """A thousand answers outweigh the prior."""
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.lognormal(7, 0.8, 1000).astype(int) + 1, CAP)
    forecast = observe_all(LengthForecast(prior_mean_tokens=8_000), tokens.tolist())
    assert forecast.fit().mean_tokens(CAP) == pytest.approx(tokens.mean(), rel=0.02)


def test_before_any_answer_the_prior_rules():
    """The configured mean is the forecast, and progress without an end raises it."""
    forecast = LengthForecast(prior_mean_tokens=2_000)
    assert forecast.fit().mean_tokens(100_000) == pytest.approx(2_000, rel=0.01)
    assert forecast.fit([3_000.0] * 50).mean_tokens(100_000) > 3_000


def test_censoring_removes_the_bias_of_early_answers():
    """Short answers finish first; those still running keep the forecast from believing them."""
    tokens = np.random.default_rng(1).lognormal(8, 0.8, 400).astype(int) + 1
    elapsed = 1_500
    finished, running = tokens[tokens <= elapsed], tokens[tokens > elapsed]
    curve = observe_all(LengthForecast(), finished.tolist()).fit([float(elapsed)] * len(running))
    truth = np.minimum(tokens, CAP).mean()
    assert finished.mean() < 0.4 * truth
    assert curve.mean_tokens(CAP) > 0.7 * truth


def test_noisy_progress_does_not_empty_the_curve():
    """The first to finish among requests sent together is fast, not the last survivor."""
    forecast = observe_all(LengthForecast(), [1_100] * 5)
    progress = [1_000.0] * 145
    blind = forecast.fit(progress).mean_tokens(CAP)
    assert forecast.fit(progress, progress_error=0.2).mean_tokens(CAP) > 1.5 * blind


def test_doubt_shrinks_with_answers():
    """The same requests in flight are surer after a thousand answers than after ten."""
    tokens = (np.random.default_rng(2).lognormal(7, 0.8, 1000).astype(int) + 1).tolist()
    few = observe_all(LengthForecast(), tokens[:10]).fit().estimate_in_flight([0.0] * 100, [CAP] * 100)
    many = observe_all(LengthForecast(), tokens).fit().estimate_in_flight([0.0] * 100, [CAP] * 100)
    assert many.variance < few.variance / 4


def test_nothing_in_flight_is_nothing_expected():
    """An empty window has neither mean nor variance."""
    estimate = LengthForecast().fit().estimate_in_flight([], [])
    assert (estimate.mean_tokens, estimate.variance) == (0.0, 0.0)


@given(tokens=lengths, cap=st.integers(1, 20_000))
def test_a_restored_forecast_is_the_same(tokens, cap):
    """State survives JSON and gives the same curve."""
    forecast = observe_all(LengthForecast(prior_mean_tokens=1_500), tokens, cap)
    state = json.loads(json.dumps(forecast.save()))
    restored = LengthForecast.restore(state, prior_mean_tokens=1_500)
    assert restored.observed == forecast.observed == len(tokens)
    assert (restored.fit([50.0]).table == forecast.fit([50.0]).table).all()
    assert restored.save() == forecast.save()


def test_a_state_of_another_grid_is_refused():
    """Counts of other bins would be nonsense here."""
    with pytest.raises(ValueError, match="bins per octave"):
        LengthForecast.restore(LengthForecast().save() | {"bins_per_octave": 8})


def test_a_prior_must_be_positive():
    """A mean of zero tokens is no prior."""
    with pytest.raises(ValueError, match="positive"):
        LengthForecast(prior_mean_tokens=0)
