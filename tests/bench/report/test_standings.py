"""Who leads is said, and by how much, whoever that is; averages are plain means."""

from statistics import fmean

import pytest

from igeood.bench.report.standings import standings
from igeood.bench.runs.averages import Averages


def stand(maker):
    ours = Averages(maker.results)
    return standings(ours, ours.classifiers()[0])


def in_order(text, *parts):
    places = [text.index(part) for part in parts]
    return places == sorted(places)


def test_the_leader_comes_first_then_igeood_or_the_best_rival(maker):
    for ood, ahead, behind in (("svhn", 0.971, 0.802), ("chars74k", 0.931, 0.762)):
        maker.cell("white-box-validation", "igeood+", ood, tnr=ahead)
        maker.cell("white-box-validation", "mahalanobis", ood, tnr=behind)
    assert in_order(stand(maker).lead(), "IGEOOD+", "95.1%", "Mahalanobis", "78.2%")


def test_igeood_behind_is_told_even_when_a_third_is_between(maker):
    for method, tnr in (("energy", 0.8), ("odin", 0.7), ("igeood-logits", 0.2)):
        maker.cell("black-box", method, "svhn", tnr=tnr)
    sentence = stand(maker).lead()
    assert in_order(sentence, "Energy", "80.0%", "IGEOOD", "20.0%")
    assert "ODIN" not in sentence


@pytest.mark.parametrize(
    ("cells", "shown"),
    [
        ({"energy": 0.5, "igeood-logits": 0.5}, ["Energy", "IGEOOD", "50.0%"]),  # level
        ({"energy": 0.50, "igeood-logits": 0.53}, ["3.0 points", "sampling error"]),  # few images
        ({"igeood-logits": 0.5}, ["IGEOOD", "50.0%"]),  # no rival
        ({"energy": 0.6, "igeood+": 0.9}, ["IGEOOD+ (white box"]),  # several settings
        ({"msp": 0.6, "igeood+": 0.9}, ["(MSP) (black box)"]),  # which has nothing to tune
    ],
)
def test_the_sentence_has_the_figures(maker, cells, shown):
    for method, tnr in cells.items():
        maker.cell("white-box" if method == "igeood+" else "black-box", method, "svhn", tnr=tnr)
    sentence = stand(maker).lead()
    assert [text for text in shown if text not in sentence] == []


def test_averages_are_over_sets_that_all_rows_have_or_of_the_widest_rows(maker):
    maker.cell("black-box", "energy", "svhn", tnr=0.5).cell("black-box", "energy", "chars74k", tnr=1.0)
    standing = stand(maker.cell("black-box", "odin", "svhn", tnr=0.6))
    assert standing.compared == ["svhn"]
    assert (standing.leader.method, standing.average(standing.leader)) == ("odin", pytest.approx(60.0))
    standing = stand(maker.cell("black-box", "igeood-logits", "textures", tnr=0.9))
    assert [row.method for row in standing.ranked()] == ["energy"]
    assert standing.average(standing.leader) == pytest.approx(75.0)
    cells = [cell for cell in maker.results.cells.records if cell["method"] == "energy"]
    for metric in ("auroc", "aupr"):
        assert standing.average(standing.leader, metric) == pytest.approx(100 * fmean(cell[metric] for cell in cells))
