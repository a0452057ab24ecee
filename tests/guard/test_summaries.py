"""Fitting is adding: summaries of shards, whatever the batches; and detectors of the user's own."""

from functools import partial

import numpy as np
import pytest
import torch

import igeood
from igeood.outputs import HEAD

SAME = {"rtol": 0.0, "atol": 1e-4}  # a network's outputs differ in their last digits from batch to batch


@pytest.mark.parametrize(("method", "budget"), [("igeood-logits", 20_000), ("igeood", 40_000)])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_batches_and_shards_give_one_guard(model, data, method, budget, size, tmp_path):
    """The sample is the same to the row, above the budget too; the scores are, up to rounding in the network."""
    build = partial(igeood.white_box if method == "igeood" else igeood.black_box, method=method)
    x, y = data.images(800, 1)
    whole = build(model).fit((x, y), budget=budget)
    batches = list(zip(x.split(size), y.split(size), strict=True))
    assert 0 < len(whole.summary.samples["logits"]) < 800
    shards, third = [], len(batches) // 3
    for part in (batches[:third], batches[third:]):
        igeood.summarise(build(model), part, budget=budget).save(tmp_path / "shard")
        shards.append(igeood.Summary.load(tmp_path / "shard"))
    plain = build(model).fit(batches, budget=budget)
    for fitted in (plain, build(model).fit(shards[0] + shards[1]), build(model).fit(shards[1] + shards[0])):
        for name, sample in whole.summary.samples.items():
            kept = (each.outputs()[0].keys for each in (fitted.summary.samples[name], sample))
            assert np.array_equal(*kept)
        assert np.array_equal(fitted.fitted_on.keys, whole.fitted_on.keys)
        assert fitted.layers == whole.layers
        torch.testing.assert_close(fitted.score(data.test), whole.score(data.test), **SAME)


def test_summaries_that_do_not_fit(model, data, known, refused):
    summary = igeood.summarise(igeood.white_box(model, method="igeood"), data.train)
    assert igeood.black_box(model, method="igeood-logits").fit(summary).layers == []  # reads what it needs, no more
    foreign = igeood.summarise(igeood.white_box(method="igeood"), known.train)
    for options, other in (
        ({"method": "mahalanobis"}, summary),  # needs other sums
        ({"layers": ["2"], "method": "igeood"}, summary),
        ({"method": "igeood"}, foreign),  # of another model
    ):
        with refused("summary"):
            igeood.white_box(model, **options).fit(other)
    with refused("guard"):
        igeood.summarise(model, data.train)


class Nearest(igeood.Detector):
    """Distance to the nearest class mean, summed over the blocks that it needs."""

    def learn(self, summary):
        super().learn(summary)
        self.means_ = {block: sums.mean for block, sums in summary.sums.items()}
        return self

    def score(self, outputs):
        return sum(torch.cdist(outputs.features[b].double(), mean).amin(1) for b, mean in self.means_.items())


def places(trace):
    return [name for name in trace.names.values() if name in ("1", "4")]


def largest(call):
    return call.output.flatten(2).amax(2)


OWN = {
    "none": ({"head": True}, [HEAD]),
    "last": ({}, [HEAD]),
    "all": ({"head": True}, ["2", "6", HEAD]),
    places: ({"pool": largest}, ["1|largest", "4|largest"]),
}


@pytest.mark.parametrize("layers", OWN)
def test_a_detector_of_ones_own_reads_what_it_needs(model, data, layers):
    options, blocks = OWN[layers]
    needs = igeood.Needs(layers=layers, labels=True, sums="mean", **options)
    own = type("NearestMean", (Nearest,), {"needs": needs})
    guard = igeood.white_box(model, method=own()).fit(data.train)
    assert guard.layers == list(guard.detector.means_) == blocks
    assert igeood.metrics.auroc(guard.score(data.test), guard.score(data.foreign)) > 0.6
    names = [block.removesuffix("|largest") for block in blocks if block != HEAD]
    read = {"pool": options.get("pool"), "head": HEAD in blocks}
    outputs = [igeood.extract(model, x, names, **read) for x in (data.train, data.test)]
    arrays = igeood.white_box(method=own()).fit(outputs[0])
    torch.testing.assert_close(arrays.score(outputs[1]), guard.score(data.test), **SAME)
