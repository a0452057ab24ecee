"""The monitor is its formulas, whatever the batches; its evidence is a martingale, exactly; false alarms are rare."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import igeood
from igeood import calibration as ranks
from igeood.calibration import Calibration
from igeood.errors import GuardFileError, IgeoodWarning, InputError, NotReadyError
from igeood.guard import Verdict
from igeood.monitor import BETS, LEVELS, Alarm, Monitor

NEVER = 1e300


def calibration(scores, tpr=0.5, **options):
    return Calibration(torch.as_tensor(np.asarray(scores, dtype=np.float64)), tpr, **options)


def verdict(scores, flags=None, unread=()):
    scores = np.asarray(scores, dtype=np.float64)
    reason = np.full(len(scores), None, dtype=object)
    reason[list(unread)] = "not read"
    flags = np.zeros(len(scores), bool) if flags is None else np.asarray(flags)
    return Verdict(flags, scores, np.ones(len(scores)), np.zeros(len(scores), int), reason)


def streams(n, length, levels=None, seed=0):
    """Calibration scores and a stream from the same source; with few levels, heavily tied."""
    draws = np.random.default_rng([seed, n]).normal(size=n + length)
    draws = draws if levels is None else np.floor(levels * np.exp(-(draws**2)))
    return draws[:n], draws[n:]


def naive(cal, scores, run_length, seed=0):
    """Evidence after each score, and the alarms, from the formulas: pairs of score and tie-breaker, one by one."""
    n, order = len(cal), np.sort(cal)
    known = [*zip(order, ranks._draws(seed, 0, 0, n), strict=True)]
    breakers = ranks._draws(seed, 1, 0, len(scores))
    sets = [math.floor(level * (n + 1) + 1e-9) for level in LEVELS if level * (n + 1) >= 1 - 1e-9]
    cells = [*itertools.product(range(len(sets)), BETS)]
    hits, wealth, ratios = [0] * len(sets), dict.fromkeys(cells, 0.0), {cell: {} for cell in cells}
    evidence, alarms = [], []
    for t, pair in enumerate(zip(scores, breakers, strict=True)):
        above = sum(other > pair for other in known)
        for v, bet in cells:
            null = (sets[v] + hits[v]) / (n + t + 1)
            factor = 1 - bet + bet * (above < sets[v]) / null
            wealth[v, bet] = factor * (wealth[v, bet] + 1)
            ratios[v, bet] = {start: factor * ratio for start, ratio in {**ratios[v, bet], t: 1.0}.items()}
        hits = [count + (above < size) for count, size in zip(hits, sets, strict=True)]
        evidence.append(sum(wealth.values()) / len(cells))
        if evidence[-1] >= run_length:
            best = max((ratio, -start) for of_cell in ratios.values() for start, ratio in of_cell.items())
            alarms.append(Alarm(t, -best[1], evidence[-1]))
            wealth, ratios = dict.fromkeys(cells, 0.0), {cell: {} for cell in cells}
    return np.array(evidence), alarms


@pytest.mark.parametrize("levels", [None, 5, 1])
@pytest.mark.parametrize(("n", "run_length"), [(4, NEVER), (30, 40.0), (120, 200.0)])
def test_it_is_what_the_formulas_say(n, run_length, levels):
    cal, scores = streams(n, 700, levels)
    scores[200:260] += 0.0 if levels else 1.5
    expected, alarms = naive(cal, scores, run_length, seed=7)
    found = Monitor(calibration(cal), run_length, seed=7)
    np.testing.assert_allclose(found.update(verdict(scores)), expected, rtol=1e-9)
    assert [(a.at, a.since) for a in found.alarms] == [(a.at, a.since) for a in alarms][:100]
    assert (found.alarm_count, found.alarm, found.inputs) == (len(alarms), bool(alarms), 700)
    assert run_length == NEVER or len(alarms) > 1


@pytest.fixture(scope="module")
def mixed():
    """A stream with ties, a change, and rows that were not read, some of them right after an alarm."""
    cal, scores = streams(60, 1500, 40)
    scores[600:900] += 12
    unread = [0, 1, 50, *range(605, 1000, 3), 1499]
    whole = Monitor(calibration(cal), 300.0, seed=3)
    return calibration(cal), verdict(scores, unread=unread), whole.update(verdict(scores, unread=unread)), whole


@settings(max_examples=40)
@given(st.lists(st.integers(0, 1500), max_size=8), st.booleans())
def test_batches_of_any_size_and_a_saved_state_are_the_whole(mixed, tmp_path_factory, cuts, is_saved):
    cal, every, expected, whole = mixed
    part, path, evidence = Monitor(cal, 300.0, seed=3), tmp_path_factory.getbasetemp() / "state.json", []
    for start, end in itertools.pairwise([0, *sorted(cuts), 1500]):
        evidence.append(part.update(every[start:end]))
        if is_saved:
            part.save(path)
            part = Monitor.load(path, cal)
    np.testing.assert_allclose(np.concatenate(evidence), expected, rtol=1e-9)
    assert [a[:2] for a in part.alarms] == [a[:2] for a in whole.alarms]
    for name in ("inputs", "unread", "alarm_count", "since", "run_length", "kind", "seed"):
        assert getattr(part, name) == getattr(whole, name)


def test_rows_that_were_not_read_are_no_evidence(mixed):
    cal, every, evidence, whole = mixed
    is_read = np.array([why is None for why in every.reason])
    read_only = Monitor(cal, 300.0, seed=3)
    np.testing.assert_allclose(read_only.update(every[is_read]), evidence[is_read], rtol=1e-12)
    assert (whole.unread, whole.inputs, read_only.inputs) == ((~is_read).sum(), 1500, is_read.sum())
    before = np.append(0.0, evidence[:-1])
    before[before >= 300.0] = 0.0  # an alarm was there, and the wealth restarted
    assert (evidence[~is_read] == before[~is_read]).all()


@pytest.mark.parametrize("scores", ["abcdefg", "aabbccc", "aaaaaab", "aaaaaaa"])
@pytest.mark.parametrize("n", [4, 5])
def test_the_expected_evidence_is_the_number_of_inputs(scores, n, monkeypatch):
    """Exactly, over all orders in which the samples may come, n for the calibration: the level 0.2 alone is active."""
    pairs = [(float(ord(s)), (0.37 * i) % 1) for i, s in enumerate(scores)]
    evidence = []
    for stream in itertools.permutations(range(7), 7 - n):
        rest = sorted(pairs[i] for i in range(7) if i not in stream)
        drawn = {0: [u for _, u in rest], 1: [pairs[i][1] for i in stream]}
        monkeypatch.setattr(ranks, "_draws", lambda _, which, first, k, d=drawn: np.array(d[which][first : first + k]))
        watcher = Monitor(calibration([s for s, _ in rest]), NEVER)
        evidence.append(watcher.update(verdict([pairs[i][0] for i in stream])))
    np.testing.assert_allclose(np.mean(evidence, axis=0), np.arange(1, 8 - n), rtol=1e-12)


@pytest.mark.parametrize("size", [1e-14, 1.0, 28.0, 1e300])
def test_scores_that_only_rounding_sets_apart_are_tied(size):
    """A second computation that rounds all scores upwards is no change."""
    scores = -size * np.repeat([1.0, 2.0, 3.0], 200)
    rng = np.random.default_rng(0)
    watcher = Monitor(calibration(rng.permutation(scores)), 1e6)
    watcher.update(verdict(rng.permutation(scores) * (1 - 1e-14)))
    assert not watcher.alarm
    assert watcher._hits.tolist() == pytest.approx(watcher._sizes / 601 * 600, rel=0.9)


def test_the_grid_of_ties_does_not_depend_on_the_calibration_scores():
    """One that does, such as the threshold's margin, puts inputs of a very sure classifier too often above all."""
    n, inputs = 39, 50
    above = []
    for seed in range(1500):
        scores = -28 * (1 - 1e-12 * np.random.default_rng(seed).random(n + inputs))
        above.append(np.less.outer(ranks.SeededRanks(scores[:n], seed).above(scores[n:], 0), [2, 8]).mean(axis=0))
    error = np.std(above, axis=0) / math.sqrt(len(above))
    assert (np.abs(np.mean(above, axis=0) - np.array([2, 8]) / 40) <= 4 * error).all()


def bound(chance, count):
    return chance + 3 * math.sqrt(chance * (1 - chance) / count)


@pytest.mark.parametrize(("n", "levels"), [(19, None), (1000, None), (100, 3)])
def test_false_alarms_are_as_rare_as_promised(n, levels):
    alarms = []
    for seed in range(200):
        cal, scores = streams(n, 1000, levels, seed)
        alarms.append(Monitor(calibration(cal), 4000.0, seed=seed).update(verdict(scores)).max() >= 4000.0)
    assert 0 < np.mean(alarms) <= bound(1000 / 4000, 200)


def test_false_alarms_of_flags_at_a_tolerance_threshold():
    """A marginal threshold breaks the bound, which is why it is refused."""
    alarms = {"tolerance": [], "marginal": []}
    for seed, guarantee in itertools.product(range(120), alarms):
        cal, scores = streams(100, 8000, seed=seed)
        flags = scores > calibration(cal, 0.95, guarantee=guarantee).threshold
        watcher = Monitor(calibration(cal, 0.95, guarantee="tolerance"), 80_000.0, "flags")
        alarms[guarantee].append(watcher.update(verdict(scores, flags)).max() >= 80_000.0)
    allowed = bound(0.1 + 0.05, 120)  # the threshold itself fails with a probability of 5%
    assert np.mean(alarms["tolerance"]) <= allowed < np.mean(alarms["marginal"])


def test_flags_are_bets_on_the_rate_of_refusals():
    cal, flags = calibration(range(100), 0.9, guarantee="tolerance"), np.arange(40) % 3 == 0
    evidence, wealth = Monitor(cal, NEVER, "flags").update(verdict(np.zeros(40), flags)), np.zeros(len(BETS))
    for flag, found in zip(flags, evidence, strict=True):
        wealth = (1 - BETS + BETS * flag / 0.1) * (wealth + 1)
        assert found == pytest.approx(wealth.mean(), rel=1e-9)


@pytest.mark.parametrize("kind", ["p-values", "flags"])
def test_a_change_is_found_with_its_start(kind):
    for seed in range(5):
        cal, scores = streams(1000, 4000, seed=seed)
        is_foreign = (np.arange(4000) >= 2000) & (np.random.default_rng(seed).random(4000) < 0.3)
        scores = np.where(is_foreign, scores + 4, scores)
        watched = calibration(cal, 0.95, guarantee="tolerance")
        watcher = Monitor(watched, kind=kind)
        watcher.update(verdict(scores, scores > watched.threshold))
        assert 2000 < watcher.alarms[0].at < 2150
        assert abs(watcher.since - 2000) < 40
        assert watcher.alarms[0].evidence >= 1e6


def test_evidence_too_large_for_a_float_is_an_alarm_without_a_warning():
    watcher = Monitor(calibration(range(100)), NEVER)
    watcher._bets.wealth[:] = 1.15e307  # whose sum is a float, and no longer after one input among the upper fifth
    assert watcher.update(verdict([89.5, *[999.0] * 2000]))[0] == math.inf
    assert watcher.alarms[0].at == 0
    assert math.isfinite(watcher.evidence)


def test_levels_that_the_set_is_too_small_for_are_left_out_with_a_warning(recwarn):
    assert Monitor(calibration(range(1000)))._sizes.tolist() == [10, 50, 200]
    assert not recwarn
    for n, sizes in {4: [1], 18: [3], 19: [1, 4], 98: [4, 19], 99: [1, 5, 20]}.items():
        with pytest.warns(IgeoodWarning):
            assert Monitor(calibration(range(n)))._sizes.tolist() == sizes


def test_bad_arguments_are_named(refused):
    cal = calibration(range(100))
    cases = [((calibration(range(3)),), "guard"), (("guard.safetensors",), "guard")]
    cases += [((cal, length), "run_length") for length in (0.5, math.nan, True, "9")]
    cases += [((cal, 9, kind), "kind") for kind in ("p-value", "flags")]
    for arguments, argument in cases:
        with refused(argument):
            Monitor(*arguments)
    with refused("seed"):
        Monitor(cal, seed=-1)
    with pytest.raises(NotReadyError):
        Monitor(igeood.black_box())
    with pytest.raises(InputError):
        Monitor(cal).update(np.ones(3))
    assert Monitor(cal).update(verdict([math.inf, -math.inf])).shape == (2,)


def test_a_state_of_another_guard_or_version_is_refused_and_so_is_a_damaged_one(tmp_path, refused):
    cal, path = calibration(np.arange(100.0)), tmp_path / "state.json"
    Monitor(cal, 50.0, seed=5).save(path)
    state = json.loads(path.read_text())
    for other in (calibration(np.arange(100.0) + 1e-9), calibration(np.arange(100.0), 0.6), calibration(range(50))):
        with refused("path"):
            Monitor.load(path, other)
    changes = [{"wealth": [[1.0]]}, {"hits": "many"}, {"likelihood": [[math.nan] * 5] * 3}, {"start": [[-1] * 5] * 3}]
    changes += [{"inputs": -1}, {"unread": 999}, {"alarm_count": -1}, {"alarms": [[1, 2]]}, {"alarms": 3}]
    changes += [{"kind": "flags"}, {"kind": []}, {"run_length": "long"}, {"seed": -1}, {"inputs": math.inf}]
    texts = [json.dumps({**state, **change}) for change in changes]
    texts += [path.read_text()[:-40], "", "[]", "3", "{}", "\x00", "[" * 100_000]
    texts += [json.dumps({name: value for name, value in state.items() if name != missing}) for missing in state]
    for text in texts:
        path.write_text(text)
        with pytest.raises(GuardFileError) as caught:
            Monitor.load(path, cal)
        assert caught.value.place == str(path)
    path.write_text(json.dumps({**state, "format": "igeood monitor 9"}))
    with pytest.raises(InputError):
        Monitor.load(path, cal)
