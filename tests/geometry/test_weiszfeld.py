"""One pass of Weiszfeld's iteration, and the search that the passes drive."""

import math

import pytest
import torch

from igeood.geometry import categorical
from igeood.geometry.sphere import chord_distance, sphere
from igeood.geometry.weiszfeld import Points, Search, _angle_and_gradient, polish, sphere_sums


def test_sums_against_a_loop(make):
    """One pass, sample by sample: the angle, its inverse, the unit tangent, who sits on the centre, and the octave."""
    data = make(3, n=30, margin=2.0)
    centre = sphere(torch.eye(3) * 2.0)
    logits = torch.cat([data.train.double(), torch.eye(3, dtype=torch.float64) * 2.0])
    labels = torch.cat([data.labels, torch.arange(3)])
    sums = sphere_sums([(logits, labels)], centre)
    for c in range(3):
        points = sphere(logits[labels == c])
        angles = torch.acos((points @ centre[c]).clamp(max=1.0))[:-1]
        tangents = points[:-1] - (points[:-1] @ centre[c])[:, None] * centre[c]
        pull = (tangents / torch.linalg.vector_norm(tangents, dim=1, keepdim=True)).sum(dim=0)
        found = sums.pull[c] - (sums.pull[c] @ centre[c]) * centre[c]
        torch.testing.assert_close(found, pull, rtol=1e-9, atol=1e-9)
        assert sums.weight[c].item() == pytest.approx((1 / angles).sum().item(), rel=1e-9)
        assert sums.angle[c].item() == pytest.approx(angles.sum().item(), rel=1e-9)
        assert sums.coincident[c].item() == 1.0
        assert sums.count[c].item() == len(points)
        octaves = torch.zeros(44, dtype=torch.int64)
        octaves[0] = 1  # the one on the centre
        for angle in angles.tolist():
            octaves[42 + math.frexp(angle)[1]] += 1  # the last holds those from 1 to 2
        assert torch.equal(sums.octaves[c], octaves)


def test_sums_in_chunks_are_those_of_the_whole(make, monkeypatch):
    data = make(3, n=30, margin=2.0)
    centre, batch = sphere(torch.eye(3) * 2.0), [(data.train, data.labels)]
    whole = sphere_sums(batch, centre)
    monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", 12)
    found = sphere_sums(batch, centre)
    for name in ("pull", "weight", "angle", "coincident", "octaves", "count"):
        torch.testing.assert_close(getattr(found, name), getattr(whole, name), rtol=1e-12, atol=1e-12)


def test_the_nearest_sample_is_of_its_class_and_not_on_the_centre(make, monkeypatch):
    data = make(4, n=60, margin=2.0)
    points = sphere(data.train)
    centre = points[:4].clone()  # samples themselves, one of each class
    for chunk in (40, 1 << 18):
        monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", chunk)
        found = Points([(data.train, data.labels)], 1.0).nearest(centre)
        for c in range(4):
            own = points[data.labels == c]
            apart = chord_distance(own, centre[c])
            apart[apart == 0] = torch.inf
            assert torch.equal(found[c], own[apart.argmin()])
    alone = Points([(data.train[:4], data.labels[:4])], 1.0).nearest(centre)
    assert torch.equal(alone, centre)


def test_dropped_classes_are_not_seen_again(make):
    data = make(4, n=60, margin=2.0)
    wanted = torch.tensor([True, False, True, False])
    for keep in (True, False):
        points = Points([(data.train, data.labels)], 1.0, keep)
        points.only(wanted)
        for _ in range(2):
            assert {int(y) for _, labels in points for y in labels} == {0, 2}
        total = points.sums(sphere(torch.eye(4)))
        assert total.count.tolist() == [15, 0, 15, 0]


@pytest.fixture
def started(make):
    """Points of four classes, and a search that starts at sharp corners."""
    data = make(4, n=80, margin=2.0)
    points = Points([(data.train, data.labels)], 1.0)
    centre = sphere(torch.eye(4) * 5)
    return data, points, Search(centre, points.sums(centre))


def test_the_first_proposal_is_weiszfelds_step(started):
    """Along the geodesic of Σu, by ‖Σu‖ / Σ1/θ, or half a radian."""
    data, _, search = started
    trial = search.propose()
    for c in range(4):
        own, centre = sphere(data.train[data.labels == c]), search.centre[c]
        tangents = own - (own @ centre)[:, None] * centre
        unit = tangents / torch.linalg.vector_norm(tangents, dim=1, keepdim=True)
        step = unit.sum(dim=0) / (1 / torch.acos(own @ centre)).sum()
        length = torch.linalg.vector_norm(step)
        size = length.clamp(max=0.5)
        torch.testing.assert_close(trial[c], torch.cos(size) * centre + torch.sin(size) * step / length)


@pytest.mark.parametrize("stretch", [1.0, 3.0, 1e3, 1e9])
def test_no_step_is_longer_than_half_a_radian_or_leaves_the_positive_part(started, stretch):
    search = started[2]
    length = chord_distance(search.propose(), search.centre) / 2
    search.stretch = search.stretch * stretch
    trial = search.propose()
    assert (trial >= 0).all()
    torch.testing.assert_close(trial.square().sum(dim=1), torch.ones(4, dtype=torch.float64))
    found = chord_distance(trial, search.centre) / 2
    assert (found <= 0.5 + 1e-9).all()
    torch.testing.assert_close(found, (stretch * length).clamp(max=0.5))


def test_a_better_centre_is_taken_and_a_worse_one_is_not(started):
    _, points, search = started
    start, better = search.centre, search.propose()
    search.move(better, points.sums(better))
    assert torch.equal(search.centre, better)
    assert torch.equal(search.sums.angle, points.sums(better).angle)
    assert (search.stretch >= 1).all()
    stretched = search.stretch = torch.tensor([50.0, 1.0, 2.0, 1.0], dtype=torch.float64)
    worse = torch.where(torch.tensor([True, False, True, False])[:, None], start.roll(1, 0), search.propose())
    search.move(worse, points.sums(worse))
    assert torch.equal(search.centre[[0, 2]], better[[0, 2]])
    assert torch.equal(search.centre[[1, 3]], worse[[1, 3]])
    assert torch.equal(search.sums.angle, points.sums(search.centre).angle)
    torch.testing.assert_close(search.stretch[[0, 2]], (0.2 * stretched[[0, 2]]).clamp(min=1.0))


def test_the_best_is_that_of_the_smallest_gap(started):
    search = started[2]
    first, gap = search.best, search.gap
    trial = search.propose()
    search.note(trial, gap * torch.tensor([0.5, 2.0, 1.0, 0.1]))
    assert torch.equal(search.best, torch.where(torch.tensor([True, False, False, True])[:, None], trial, first))
    torch.testing.assert_close(search.gap, gap * torch.tensor([0.5, 1.0, 1.0, 0.1]))


def test_the_optimum_is_within_reach(make):
    """The bound on its angle holds wherever the centre is, and is at most twice the mean angle."""
    data = make(4, n=80, margin=4.0)
    optimum = torch.exp(0.5 * categorical.centroids(data.train, data.labels, 4))
    for sharpness in (0.5, 2.0, 4.0, 8.0):
        centre = sphere(torch.eye(4) * sharpness)
        sums = sphere_sums([(data.train, data.labels)], centre)
        apart = chord_distance(centre, optimum) / 2
        assert (apart <= sums._reach() + 1e-9).all()
        assert (sums._reach() <= 2 * sums.angle / sums.count + 1e-12).all()


def test_a_tight_cluster_is_within_its_own_reach():
    """Nine of ten samples within r of the centre: the optimum is no farther than 2·0.9/0.8·r, to an octave."""
    angles = torch.tensor([0.01] * 9 + [1.2], dtype=torch.float64)
    logits = torch.stack([2 * torch.cos(angles).log(), 2 * torch.sin(angles).log()], dim=1)
    centre = torch.eye(2, dtype=torch.float64)
    batch = [(torch.cat([logits, torch.zeros(1, 2, dtype=torch.float64)]), torch.tensor([0] * 10 + [1]))]
    reach = sphere_sums(batch, centre)._reach()[0].item()
    assert 0.9 / 0.4 * 0.01 <= reach <= 2 * 0.9 / 0.4 * 0.01


def test_samples_on_the_centre_hold_it():
    """As many there as pull elsewhere: nothing moves, and the gap is 0."""
    logits = torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 1.0], [0.0, 2.0]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 1])
    centre = sphere(torch.tensor([[3.0, 0.0], [0.0, 2.0]], dtype=torch.float64))
    sums = sphere_sums([(logits, labels)], centre)
    assert sums.coincident.tolist() == [2.0, 1.0]
    assert sums.gap(centre).tolist() == [0.0, 0.0]
    assert sums.descent(centre).abs().max() == 0.0
    one = sphere_sums([(logits[[0, 2, 2, 3]], labels)], centre)  # one against two: half of the pull is left
    length = torch.linalg.vector_norm(one.descent(centre)[0]).item()
    assert length == pytest.approx(1.0, rel=1e-9)
    assert one.gap(centre)[0].item() > 0


def few_samples():
    """Four samples a class, far apart: a flat valley."""
    generator = torch.Generator().manual_seed(389)
    return torch.randn(12, 3, generator=generator, dtype=torch.float64) * 10, torch.arange(12) % 3


def test_polishing_finds_the_optimum_of_unfinished_classes_alone():
    logits, labels = few_samples()
    points = Points([(logits, labels)], 1.0)
    centre = sphere(torch.zeros(3, 3, dtype=torch.float64))
    search = Search(centre, points.sums(centre))
    found = polish(points, search, torch.tensor([True, False, True]))
    assert torch.equal(found[1], centre[1])
    assert (found >= 0).all()
    torch.testing.assert_close(found.square().sum(dim=1), torch.ones(3, dtype=torch.float64))
    best = points.sums(torch.exp(0.5 * categorical.centroids(logits, labels, 3))).angle
    torch.testing.assert_close(points.sums(found).angle[[0, 2]], best[[0, 2]], rtol=1e-5, atol=0)
    assert torch.equal(search.best, centre)


@pytest.mark.parametrize("length", [0.3, 1.0, 4.0])
def test_the_polished_function_has_its_gradient(length):
    """Of the direction alone: the angles do not depend on the vector's length."""
    logits, labels = few_samples()
    own = sphere(logits[labels == 0])
    v = sphere(torch.tensor([1.0, 0.3, -0.4], dtype=torch.float64)) * length
    value, gradient = _angle_and_gradient(v.numpy(), own)
    assert value == pytest.approx(torch.acos(own @ (v / length)).sum().item(), rel=1e-12)
    for i in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[i] = 1e-6
        ends = [_angle_and_gradient((v + sign * step).numpy(), own)[0] for sign in (1, -1)]
        assert gradient[i] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-7)
