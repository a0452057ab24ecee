"""The paper's numbers: complete, in range, and as consistent as the paper is."""

from collections import Counter, defaultdict
from dataclasses import asdict
from statistics import fmean

import pytest

from igeood import METHODS
from igeood.bench.paper.reported import find, load

DATASETS = {"cifar-10", "cifar-100", "svhn", "tiny-imagenet", "lsun", "isun"}
DATASETS |= {"textures", "chars74k", "places365", "gaussian"}
PERCENTAGES = {"tnr", "auroc", "aupr", "accuracy", "accuracy_fisher_rao", "adversarial_accuracy"}
LABELS = list(dict.fromkeys(one.label for one in load()))


def test_vocabulary_is_closed_and_numbers_are_unique_and_in_range():
    words = {
        "setting": {"", "black-box", "grey-box", "white-box", "white-box-fgsm"},
        "network": {"densenet-bc-100", "resnet-34", "average"},
        "in_distribution": {"cifar-10", "cifar-100", "svhn", "average"},
        "validation": (DATASETS - {"cifar-10"}) | {"", "own", "fgsm", "average"},
        "ood": DATASETS | {"", "average"},
    }
    for field, allowed in words.items():
        assert {getattr(one, field) for one in load()} == allowed, field
    assert {one.method for one in load()} <= {*METHODS, ""}
    assert (len(load()), len(LABELS)) == (2810, 18)
    keys = Counter((*_place(one), one.label, one.ood, one.validation) for one in load())
    assert max(keys.values()) == 1
    for one in load():
        assert one.ood != one.in_distribution or one.ood == "average"
        assert one.spread is None or 0 <= one.spread < 50
        assert one.metric.startswith("weight") or 0 <= one.value <= (100 if one.metric in PERCENTAGES else 1e22)


# The averages that are further than 0.06 from the mean of the paper's own rows, with that mean. Up to 0.1 can be
# rounding alone: of the rows, and of the average.
ROUNDING = {
    "tab:other_comparisons white-box densenet-bc-100 svhn residual-flow tnr": (99.6, 99.6667),
    "tab:other_comparisons_adv white-box-fgsm resnet-34 cifar-10 igeood tnr": (96.3, 96.375),
    "tab:other_comparisons_adv white-box-fgsm resnet-34 cifar-100 deconf-c tnr": (71.0, 70.925),
    "tab:black_box_extended black-box resnet-34 cifar-100 odin aupr": (72.3, 72.2375),
    "tab:black_box_extended black-box resnet-34 svhn igeood-logits aupr": (92.4, 92.3375),
    "tab:black_box_extended black-box average average energy auroc": (85.1, 85.1833),
    "tab:black_box_extended black-box average average odin aupr": (84.7, 84.6333),
}
INCONSISTENT = {
    # One row, Places365, says 9.30; with 39.30 the mean would be right.
    "tab:seed_model_error black-box densenet-bc-100 cifar-10 msp tnr": (41.7, 37.925),
    "tab:wb_ood_extended white-box densenet-bc-100 cifar-100 mahalanobis tnr": (67.7, 65.7556),
    "tab:wb_ood_extended white-box densenet-bc-100 cifar-100 igeood+ tnr": (90.2, 85.2556),
    "tab:wb_ood_extended white-box densenet-bc-100 cifar-100 igeood+ auroc": (97.7, 96.4333),
    "tab:wb_ood_extended white-box densenet-bc-100 cifar-100 igeood+ aupr": (97.8, 96.6111),
    # The table's last line; that of tab:black_box_avg, which leaves AUPR out, agrees with its rows.
    "tab:black_box_extended black-box average average msp tnr": (46.0, 44.9333),
    "tab:black_box_extended black-box average average odin tnr": (51.6, 50.2833),
    "tab:black_box_extended black-box average average energy tnr": (52.1, 51.0667),
    "tab:black_box_extended black-box average average igeood-logits tnr": (52.6, 51.65),
    "tab:black_box_extended black-box average average msp auroc": (85.3, 84.8167),
    "tab:black_box_extended black-box average average odin auroc": (85.4, 84.7667),
    "tab:black_box_extended black-box average average igeood-logits auroc": (85.8, 85.6833),
    "tab:black_box_extended black-box average average energy aupr": (84.4, 84.8),
    "tab:black_box_extended black-box average average igeood-logits aupr": (85.1, 85.3833),
}


def test_averages_are_the_means_of_their_tables_rows():
    found = _further_than(0.06, _averages_within_tables())
    assert found == ROUNDING | INCONSISTENT
    assert all(abs(printed - mean) <= 0.1 for printed, mean in ROUNDING.values())
    assert all(abs(printed - mean) > 0.1 for printed, mean in INCONSISTENT.values())


# Mahalanobis tuned on OOD data has other averages in the short table than in the long one; Igeood+ on CIFAR-100 has the
# same two that the long table's rows contradict.
SHORT_AGAINST_LONG = {
    "tab:white_box_avg white-box densenet-bc-100 cifar-10 mahalanobis tnr": (76.6, 77.4889),
    "tab:white_box_avg white-box densenet-bc-100 cifar-100 mahalanobis tnr": (67.2, 65.7556),
    "tab:white_box_avg white-box densenet-bc-100 cifar-100 mahalanobis auroc": (90.2, 87.7556),
    "tab:white_box_avg white-box densenet-bc-100 cifar-100 igeood+ tnr": (90.2, 85.2556),
    "tab:white_box_avg white-box densenet-bc-100 cifar-100 igeood+ auroc": (97.7, 96.4333),
    "tab:white_box_avg white-box densenet-bc-100 svhn mahalanobis tnr": (93.3, 95.0889),
    "tab:white_box_avg white-box densenet-bc-100 svhn mahalanobis auroc": (98.6, 98.8222),
    "tab:white_box_avg white-box resnet-34 cifar-10 mahalanobis tnr": (82.5, 84.1111),
    "tab:white_box_avg white-box resnet-34 cifar-100 mahalanobis tnr": (70.4, 70.8),
    "tab:white_box_avg white-box resnet-34 cifar-100 mahalanobis auroc": (91.9, 92.5444),
    "tab:white_box_avg white-box resnet-34 svhn mahalanobis tnr": (96.8, 97.6),
    "tab:white_box_avg white-box resnet-34 svhn mahalanobis auroc": (99.2, 99.3556),
    "tab:white_box_avg white-box-fgsm densenet-bc-100 svhn igeood tnr": (92.2, 92.3333),
}


def test_short_tables_are_the_means_of_the_long_ones():
    long = {"black-box": "tab:black_box_extended", "grey-box": "tab:grey_box_extended"}
    long |= {"white-box": "tab:wb_ood_extended", "white-box-fgsm": "tab:wb_adv_extended"}
    rows = defaultdict(list)
    for one in load():
        if one.label == long.get(one.setting) and one.ood != "average":
            rows[_place(one)].append(one.value)
    short = [one for name in ("black", "grey", "white") for one in find(label=f"tab:{name}_box_avg")]
    pairs = [(one, rows[_place(one)]) for one in short if one.network != "average"]
    assert len(pairs) == 6 * (8 + 6 + 8)
    assert _further_than(0.06, pairs) == SHORT_AGAINST_LONG


def test_cells_that_are_printed_twice_agree():
    for label, other, method, count in (
        ("tab:kl", "tab:black_box_extended", "igeood-logits", 48),
        ("tab:other_comparisons", "tab:wb_ood_extended", "igeood+", 24),
        ("tab:other_comparisons_adv", "tab:wb_adv_extended", "igeood", 24),
    ):
        twins = {(*_place(one), one.ood): one.value for one in find(label=other)}
        cells = [one for one in find(label=label, method=method) if one.ood != "average"]
        assert len(cells) == count
        for one in cells:
            assert one.value == pytest.approx(twins[(*_place(one), one.ood)], abs=0.201)


def test_find_uses_every_filter():
    wanted = load()[1000]
    fields = {name: value for name, value in asdict(wanted).items() if name not in ("value", "spread")}
    assert find(**fields) == [wanted]
    assert not any(find(**{**fields, name: "no such"}) for name in fields)


def _place(one):
    return one.setting, one.network, one.in_distribution, one.method, one.metric


def _averages_within_tables():
    """Each printed average, with the values of its own table that it is the average of."""
    for label in LABELS:
        rows = [one for one in find(label=label) if one.metric in {"tnr", "auroc", "aupr"}]
        for one in rows:
            below = [other.value for other in rows if _is_below(other, one)]
            if below:
                yield one, below


def _is_below(row, average):
    """Whether the row is one of those that this average sums up: of validation sets, networks or OOD sets."""
    if (row.setting, row.method, row.metric) != (average.setting, average.method, average.metric):
        return False
    if average.validation == "average":
        return row.validation != "average"
    if average.network == "average":
        return row.network != "average" and row.ood == "average"
    return average.ood == "average" != row.ood and _place(row) == _place(average)


def _further_than(tolerance, pairs):
    return {
        " ".join((one.label, *_place(one))): (one.value, round(fmean(values), 4))
        for one, values in pairs
        if abs(one.value - fmean(values)) > tolerance
    }
