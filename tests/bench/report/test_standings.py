"""The verdict says who is ahead, by how much and where it is weak, whoever that is; averages are plain means."""

from statistics import fmean

import pytest

from igeood.bench.report.standings import standings
from igeood.bench.runs.averages import Averages


def stand(maker):
    ours = Averages(maker.results)
    return standings(ours, ours.classifiers()[0])


def test_igeood_ahead(maker):
    for ood, ahead, behind in (("svhn", 0.971, 0.802), ("chars74k", 0.931, 0.762)):
        maker.cell("white-box-validation", "igeood+", ood, tnr=ahead)
        maker.cell("white-box-validation", "mahalanobis", ood, tnr=behind)
    verdict = stand(maker).verdict()
    where = "(white box, tuned on Gaussian noise)"
    assert verdict == [
        f"IGEOOD+ {where} refuses 95.1% of foreign inputs while 95% of known ones are kept, on average over 2 OOD "
        f"sets; Mahalanobis {where}, the best of the other families, refuses 78.2%: 16.9 points less.",
        "IGEOOD+ is weakest on Chars74K (EnglishImg), where it refuses 93.1%.",
    ]


def test_igeood_behind_is_told_even_when_a_third_is_between(maker):
    for ood, weak in (("svhn", 0.1), ("chars74k", 0.3)):
        maker.cell("black-box", "energy", ood, tnr=0.8)
        maker.cell("black-box", "odin", ood, tnr=0.7)
        maker.cell("black-box", "igeood-logits", ood, tnr=weak)
    first, last = stand(maker).verdict()
    assert first.startswith("Energy (black box, tuned on Gaussian noise) refuses 80.0%")
    assert "IGEOOD (black box, tuned on Gaussian noise), the best of IGEOOD, refuses 20.0%" in first
    assert "IGEOOD is behind by 60.0 points" in first
    assert last.startswith("IGEOOD (black box, tuned on Gaussian noise) is weakest on SVHN")
    assert "10.0%" in last


WHERE = "(black box, tuned on Gaussian noise)"
REFUSES = "of foreign inputs while 95% of known ones are kept, on SVHN"


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        ({"energy": 0.5, "igeood-logits": 0.5}, f"; IGEOOD {WHERE} is level with it."),
        ({"energy": 0.50, "igeood-logits": 0.53}, "3.0 points less (within the sampling error of so few images)."),
        ({"igeood-logits": 0.5}, f"IGEOOD {WHERE} refuses 50.0% {REFUSES}. No method of another family was measured."),
        ({"msp": 0.5}, f"Baseline (MSP) (black box) refuses 50.0% {REFUSES}."),  # it has nothing to tune
        ({"energy": 0.6, "igeood+": 0.9}, f"few have in practice; without, Energy {WHERE} refuses 60.0%."),
    ],
    ids=["a tie", "few images", "no rival", "not tuned", "tuned on the OOD sets"],
)
def test_what_the_verdict_says(maker, cells, text):
    for method, tnr in cells.items():
        maker.cell("white-box" if method == "igeood+" else "black-box", method, "svhn", tnr=tnr)
    assert text in " ".join(stand(maker).verdict())
    settings = ["Black box, tuned on Gaussian noise: Energy 60.0%."]
    settings.append("White box, tuned on samples of each OOD set: IGEOOD+ 90.0%.")
    assert stand(maker).by_access() == (settings if "igeood+" in cells else [])


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
