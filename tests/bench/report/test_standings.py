"""Who leads, and by how much; averages are plain means."""

from statistics import fmean

import pytest

from igeood.bench.report.standings import standings
from igeood.bench.runs.averages import Averages


def stand(maker):
    ours = Averages(maker.results)
    return standings(ours, ours.classifiers()[0])


@pytest.mark.parametrize(
    ("cells", "shown"),
    [
        ({"igeood+": 0.9, "mahalanobis": 0.6}, ["IGEOOD+", "90.0%", "Mahalanobis", "60.0%"]),
        ({"energy": 0.8, "odin": 0.7, "igeood-logits": 0.2}, ["Energy", "80.0%", "IGEOOD", "20.0%"]),  # its own rank
        ({"energy": 0.5, "igeood-logits": 0.5}, ["Energy", "IGEOOD", "50.0%"]),  # level
        ({"energy": 0.50, "igeood-logits": 0.53}, ["3.0 points", "sampling error"]),  # few images
        ({"igeood-logits": 0.5}, ["IGEOOD", "50.0%"]),  # no rival
    ],
)
def test_the_sentence_has_the_figures_in_order(maker, cells, shown):
    for method, tnr in cells.items():
        maker.cell("white-box" if method in ("igeood+", "mahalanobis") else "black-box", method, "svhn", tnr=tnr)
    sentence = stand(maker).lead()
    places = [sentence.index(text) for text in shown]
    assert places == sorted(places)


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
