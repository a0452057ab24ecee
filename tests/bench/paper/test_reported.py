"""The paper's numbers: complete, in range, and as consistent as the paper is."""

from collections import Counter, defaultdict
from hashlib import sha256
from statistics import fmean

import pytest

from igeood import METHODS
from igeood.bench.paper.reported import find, load

DATASETS = {"cifar-10", "cifar-100", "svhn", "tiny-imagenet", "lsun", "isun"}
DATASETS |= {"textures", "chars74k", "places365", "gaussian"}
PERCENTAGES = {"tnr", "auroc", "aupr", "accuracy", "accuracy_fisher_rao", "adversarial_accuracy"}


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
    assert (len(load()), len({one.label for one in load()})) == (2810, 18)
    keys = Counter((*_place(one), one.label, one.ood, one.validation) for one in load())
    assert max(keys.values()) == 1
    for one in load():
        assert one.ood != one.in_distribution or one.ood == "average"
        assert one.spread is None or 0 <= one.spread < 50
        assert one.metric.startswith("weight") or 0 <= one.value <= (100 if one.metric in PERCENTAGES else 1e22)
    assert sha256(repr(load()).encode()).hexdigest().startswith("a53a2dc9d5c6c42e")  # every number, as it was checked


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
    further = _further_than(0.06, pairs)
    assert (len(further), sum(" mahalanobis " in where for where in further)) == (13, 10)


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


def _place(one):
    return one.setting, one.network, one.in_distribution, one.method, one.metric


def _further_than(tolerance, pairs):
    return {
        " ".join((one.label, *_place(one))): (one.value, round(fmean(values), 4))
        for one, values in pairs
        if abs(one.value - fmean(values)) > tolerance
    }
