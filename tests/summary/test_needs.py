"""What detectors need: which blocks they read, which needs one pass serves, which summary is enough."""

from dataclasses import replace

import pytest
import torch

import igeood
from igeood.errors import InputError
from igeood.outputs import HEAD, Outputs
from igeood.summary import ClassSums, Needs, Summary, by_correct
from igeood.summary.needs import check_covers, merge_needs

ALL = Needs(layers="all", head=True, labels=True, sums="full", samples=("logits", "features"))


def spread(call):
    """A pool of one's own."""


def every_second(trace):
    """Layers of one's own choice."""


class Sums(ClassSums):
    """Sums of one's own."""


def covers(summary, wanted):
    try:
        check_covers(summary.describe(), wanted.describe(), "Mine")
    except InputError as error:
        assert error.argument == "summary"  # noqa: PT017
        return False
    return True


NAMES, PLAIN = ("a", "b", "a|spread", HEAD), ("a", "b", "c")
BLOCKS = [
    *((Needs(), NAMES, []), (Needs(head=True), NAMES, [HEAD]), (Needs(layers="last"), NAMES, [HEAD])),
    *((Needs(layers="all"), NAMES, ["a", "b"]), (Needs(layers="any", head=True), NAMES, ["a", "b", HEAD])),
    (Needs(layers="all", head=True), NAMES, ["a", "b", HEAD]),
    (Needs(layers=every_second), NAMES, ["a", "b"]),
    (Needs(layers="all", pool=spread, head=True), NAMES, ["a|spread", HEAD]),
    *((Needs(layers="last"), PLAIN, ["c"]), (Needs(layers="any"), PLAIN, ["a", "b", "c"])),  # there is no head
]


@pytest.mark.parametrize(("needs", "names", "blocks"), BLOCKS)
def test_blocks_that_are_read(needs, names, blocks):
    assert needs.blocks(names) == blocks
    assert needs.reads_layers == bool(blocks)


LACKS = [
    *({"samples": ("logits",)}, {"labels": False}, {"head": False}, {"group": by_correct}, {"pool": spread}),
    *({"transform": torch.square}, {"sums": "mean"}, {"sums": Sums}, {"layers": "last"}, {"layers": every_second}),
]


@pytest.mark.parametrize("lack", LACKS)
def test_a_summary_for_other_needs_is_refused(lack):
    assert not covers(replace(ALL, **lack), ALL)


def test_more_than_is_needed_covers_less():
    less = [{"layers": layers} for layers in ("none", "last", "any")]
    less += [{"sums": sums} for sums in ("none", "mean", "diagonal")]
    assert all(covers(ALL, replace(ALL, **change)) for change in ({}, *less))
    assert covers(replace(ALL, sums=Sums), replace(ALL, sums="none", transform=torch.square, group=by_correct))
    assert not covers(ALL, replace(ALL, sums=Sums))


def test_merged_needs_cover_each_of_them_and_functions_stay_apart():
    last = Needs(layers="last", sums="mean")
    wide = Needs(layers="all", labels=True, sums="diagonal", samples=("features",))
    needs = [Needs(labels=True, samples=("logits",)), last, wide, replace(last, group=by_correct), Needs(head=True)]
    needs += [Needs(layers="all", pool=spread, sums="mean"), Needs(layers=every_second, sums=Sums)]
    needs += [Needs(layers=every_second, samples=("features",))]
    merged = merge_needs(needs)
    assert len(merged) == 4
    assert all(any(covers(one, wanted) for one in merged) for wanted in needs)
    assert merge_needs(merged) == merged


def test_one_pass_serves_every_method(rows, suited):
    merged = merge_needs(method.needs for method in igeood.METHODS.values())
    assert len(merged) < len(igeood.METHODS) / 2
    features = {}
    for needs in merged:
        features |= suited(rows, replace(needs, head=True)).features
    rows = Outputs(rows.logits, features, rows.labels)
    rows = rows.replace(_keys=rows.keys)  # as a guard does it: the sample is the same for all
    summaries = [Summary.of(rows, needs) for needs in merged]
    for name, method in igeood.METHODS.items():
        summary = next(each for each in summaries if covers(each.needs, method.needs))
        scores = igeood.detector(name).learn(summary)(rows)
        torch.testing.assert_close(scores, igeood.detector(name).fit(rows)(rows), rtol=1e-9, atol=1e-9)
