"""The verdict says who is ahead, by how much and where it is weak, whoever that is; averages are plain means."""

import json
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


def test_a_tie_is_called_one(maker):
    maker.cell("black-box", "energy", "svhn", tnr=0.5).cell("black-box", "igeood-logits", "svhn", tnr=0.5)
    assert "is level with it" in stand(maker).verdict()[0]
    assert "points" not in stand(maker).verdict()[0]


def test_a_single_method_has_no_rival(maker):
    maker.cell("black-box", "igeood-logits", "svhn", tnr=0.5)
    assert stand(maker).verdict() == [
        "IGEOOD (black box, tuned on Gaussian noise) refuses 50.0% of foreign inputs while 95% of known ones are kept, "
        "on SVHN. No method of another family was measured."
    ]
    assert stand(maker).by_access() == []


def test_a_difference_that_few_images_cannot_show_is_called_so(maker):
    for method, tnr in (("energy", 0.50), ("igeood-logits", 0.53)):
        maker.cell("black-box", method, "svhn", tnr=tnr)
    assert "within the sampling error" in stand(maker).verdict()[0]  # 3 points; one deviation is 5


def test_a_leader_that_saw_the_ood_sets_is_compared_with_those_that_did_not(maker):
    maker.cell("white-box", "igeood+", "svhn", tnr=0.9).cell("black-box", "energy", "svhn", tnr=0.6)
    verdict = stand(maker).verdict()
    assert "few have in practice; without, Energy (black box, tuned on Gaussian noise) refuses 60.0%." in verdict[1]
    assert stand(maker).by_access() == [
        "Black box, tuned on Gaussian noise: Energy 60.0%.",
        "White box, tuned on samples of each OOD set: IGEOOD+ 90.0%.",
    ]


def test_msp_is_not_said_to_be_tuned(maker):
    maker.cell("black-box", "msp", "svhn", tnr=0.5)
    assert str(stand(maker).leader) == "Baseline (MSP) (black box)"


def test_averages_are_over_sets_that_all_rows_have(maker):
    maker.cell("black-box", "energy", "svhn", tnr=0.5).cell("black-box", "energy", "chars74k", tnr=1.0)
    maker.cell("black-box", "odin", "svhn", tnr=0.6)
    standing = stand(maker)
    assert standing.compared == ["svhn"]
    assert (standing.leader.method, standing.average(standing.leader)) == ("odin", pytest.approx(60.0))


def test_without_a_common_set_the_widest_rows_are_compared(maker):
    maker.cell("black-box", "energy", "svhn", tnr=0.5).cell("black-box", "odin", "chars74k", tnr=0.6)
    standing = stand(maker.cell("black-box", "energy", "textures", tnr=0.7))
    assert [row.method for row in standing.ranked()] == ["energy"]
    assert standing.average(standing.leader) == pytest.approx(60.0)


def test_averages_equal_those_of_the_file(whole):
    """Of a real run: means over splits, then over OOD sets."""
    ours = Averages(whole)
    found = standings(ours, ours.classifiers()[0])
    lines = [json.loads(line) for line in (whole.folder / "results.jsonl").read_text().splitlines()]
    assert found.rows
    for row in found.rows:
        for metric in ("tnr", "auroc", "aupr"):
            by_set = {}
            for line in lines:
                if (line["setting"], line["method"]) == (row.setting, row.method):
                    by_set.setdefault(line["ood"], []).append(line[metric])
            assert found.average(row, metric) == pytest.approx(100 * fmean(map(fmean, by_set.values())))
