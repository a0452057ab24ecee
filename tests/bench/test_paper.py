"""The paper's tables: our numbers where they belong, the paper's beside them, what is missing as missing; its toy."""

import math
import re
from collections import Counter
from hashlib import sha256
from statistics import fmean

import numpy as np
import pytest
import torch

from igeood import METHODS
from igeood.bench.paper.catalog import NAMES, TABLES, make
from igeood.bench.paper.layers import kept, reduction
from igeood.bench.paper.networks import accuracy, hyperparameters
from igeood.bench.paper.plots import FIGURES
from igeood.bench.paper.reported import load
from igeood.bench.paper.table import MISSING
from igeood.bench.paper.tables import averages, extended
from igeood.bench.paper.toy import OOD_I, OOD_II, TRUTH, toy
from igeood.bench.report.standings import standings
from igeood.bench.runs import Results
from igeood.bench.runs.averages import Averages, Key
from igeood.detectors.gaussians import IgeoodFeatures
from igeood.errors import InputError
from igeood.geometry import gaussian
from igeood.metrics import tnr_at_tpr

DENSENET = {"network": "densenet-bc-100", "in_distribution": "cifar-10"}
SMALL = {"network": "small", "in_distribution": "svhn", "weights": "w9"}
NETWORK = {"accuracy": 0.9454, "accuracy_fisher_rao": 0.9453, "test_images": 10000, "data": {"test": "t", "train": "r"}}


def cell(setting="black-box", method="msp", validation="isun", ood="gaussian", seed=0, weights="w0", **others):
    metrics = {"tnr": 0.5, "auroc": 0.75, "aupr": 0.8, "id_images": 9000, "ood_images": 1000, "schema": 2}
    names = {"setting": setting, "method": method, "validation": validation, "ood": ood, "seed": seed}
    return {**DENSENET, "weights": weights, **names, **metrics, "data": {"test": "t", "ood": "o"}, **others}


@pytest.fixture
def results(tmp_path):
    """Made-up numbers of one network on two of the paper's sets."""
    made = Results(tmp_path)
    made.networks.append({**DENSENET, **NETWORK, "weights": "w0", "file": "a.pt"})
    for i, method in enumerate(["msp", "odin", "energy", "igeood-logits"]):
        for j, ood in enumerate(["gaussian", "tiny-imagenet"]):
            made.cells.append(cell(method=method, ood=ood, tnr=0.1 * i + 0.3 * j + 0.2))
    for seed, tnr in enumerate([0.6, 0.8]):
        made.cells.append(cell("white-box", "igeood+", "own", "tiny-imagenet", seed=seed, tnr=tnr))
    tuned = {**cell(method="energy"), "ood": "", "temperature": 2.5, "epsilon": 0.0, "tuning": None}
    made.tunings.append(tuned)
    return made


def find(table, start):
    return next(row for row in table.rows if row[0].startswith(start))


def test_ours_and_theirs_side_by_side_and_their_averages(results):
    tnr, auroc, aupr, *_ = extended(Averages(results), "tab:black_box_extended")
    assert find(tnr, "Tiny") == ["Tiny-ImageNet", "50.0 (59.4)", "60.0 (85.0)", "70.0 (88.0)", "**80.0** (87.8)"]
    assert find(tnr, "Gaussian")[1] == "20.0 (88.1)"
    assert find(tnr, "SVHN") == ["SVHN", *(f"{MISSING} ({v:.1f})" for v in (40.4, 52.0, 49.6, 50.1))]
    assert find(tnr, "average, each")[1:3] == ["35.0 ± 15 (52.5)", "45.0 ± 15 (66.8)"]
    both = [f"35.0 ({fmean([88.1, 59.4]):.1f})", f"45.0 ({fmean([99.8, 85.0]):.1f})"]
    assert find(tnr, "mean, sets: 2")[1:3] == both
    assert find(auroc, "Tiny")[1] == "75.0 (94.1)"
    assert find(aupr, "Tiny")[1] == "80.0 (95.4)"
    table = averages(Averages(results), "black-box", "tab:black_box_avg")
    assert [len(table.rows), table.rows[-1][:3]] == [7, ["average", "", f"{MISSING} (44.9 ± 24)"]]
    means = ["35.0 ± 15 (52.5 ± 16)", "45.0 ± 15 (66.8 ± 20)", "55.0 ± 15 (65.3 ± 23)", "**65.0** ± 15 (65.6 ± 23)"]
    assert find(table, "densenet-bc-100, CIFAR-10")[1:6] == ["2", *means]
    assert find(table, "resnet-34, SVHN")[1:3] == [MISSING, f"{MISSING} (76.2 ± 7.8)"]


def test_means_are_over_sets_that_all_methods_have_and_other_options_are_not_mixed_in(results):
    """As after an interruption: one method has a set more."""
    results.cells.append(cell(method="msp", ood="svhn", tnr=0.9))
    results.cells.append(cell(method="msp", ood="textures", tnr=0.9, data={"test": "few", "ood": "x"}))
    ours = Averages(results)
    assert ours.ood("black-box") == ["gaussian", "tiny-imagenet", "svhn"]
    table = averages(ours, "black-box", "tab:black_box_avg")
    assert table.rows[0][1:3] == ["2", "35.0 ± 15 (52.5 ± 16)"]
    assert ours.left_out.total() == 1
    table = extended(ours, "tab:black_box_extended")[0]
    assert find(table, "SVHN")[1] == "90.0 (40.4)"
    assert find(table, "mean, sets: 2")[1].startswith("35.0 ")


def test_networks_are_averaged_if_they_are_the_papers_and_every_method_was_run_on_all(results):
    def average():
        return averages(Averages(results), "black-box", "tab:black_box_avg").rows[-1][2:6]

    alone = average()
    assert alone == [f"{MISSING} ({v} ± 24)" for v in (44.9, 50.3, 51.1, 51.6)]
    for place in (SMALL, {"network": "resnet-34", "in_distribution": "svhn", "weights": "w2"}):
        results.networks.append({**NETWORK, **place, "file": "c.pt"})
        for method in ("msp", "odin"):
            results.cells.append(cell(method=method, tnr=0.75, **place))
        assert average() == alone  # no network of the paper; then two methods are missing on one that is
    results.cells.append(cell(method="energy", tnr=0.75, **place))
    results.cells.append(cell(method="igeood-logits", tnr=0.75, **place))
    assert average()[0] == "55.0 ± 20 (44.9 ± 24)"


def test_another_validation_set_splits_that_are_averaged_and_cells_that_are_replaced(results):
    results.cells.append(cell(validation="svhn", method="msp", ood="gaussian", tnr=0.9))
    results.cells.append(cell("grey-box", "odin", "svhn", tnr=0.4))
    results.cells.append(cell("grey-box", "odin", "svhn", "svhn-nearest", tnr=0.9))  # tuned on a copy: not counted
    ours, key = Averages(results), Key(**DENSENET)
    with pytest.raises(InputError):
        Averages(results, "lsun")
    assert Averages(results, "svhn").value("black-box", key, "gaussian", "msp", "tnr") == pytest.approx(90.0)
    [table] = TABLES["validation-choice"](ours)
    assert (find(table, "SVHN")[2], find(table, "SVHN")[6]) == ("90.0 (55.4)", "40.0 (70.0)")
    assert (find(table, "iSUN")[2], find(table, "Textures")[2]) == ("35.0 (52.5)", f"{MISSING} (55.4)")
    assert find(table, "average")[2] == "62.5 ± 28 (53.7 ± 2)"
    assert ours.value("white-box", key, "tiny-imagenet", "igeood+", "tnr") == pytest.approx(70.0)
    results.cells.append(cell(method="msp", ood="gaussian", tnr=0.9))  # measured again
    assert Averages(results).value("black-box", key, "gaussian", "msp", "tnr") == pytest.approx(90.0)


def test_hyperparameters_and_accuracy_and_trainings_that_are_averaged_and_have_rows_of_their_own(results):
    [table] = hyperparameters(Averages(results))
    assert find(table, "densenet-bc-100, CIFAR-10")[1:4] == [f"{MISSING}; 1000", "2.5; 4.6", f"{MISSING}; 5.3"]
    [table] = accuracy(Averages(results))
    assert find(table, "densenet-bc-100, CIFAR-10")[1:] == ["94.54 (95.20)", "94.53 (95.20)", "10,000"]
    assert find(TABLES["seeds"](Averages(results))[0], "Gaussian")[1] == "20.0 (42.7 ± 49)"  # one has no spread
    results.networks.append({**DENSENET, **NETWORK, "weights": "w1", "file": "b.pt", "accuracy": 0.9})
    results.cells.append(cell(weights="w1", method="msp", ood="gaussian", tnr=0.4))
    seeds = TABLES["seeds"](Averages(results))
    assert find(seeds[0], "Gaussian")[1] == "30.0 ± 10 (42.7 ± 49)"
    assert seeds[-1].rows == [["densenet-bc-100, CIFAR-10", "92.27 ± 2.3 (94.58 ± 0.13)"]]
    [table] = accuracy(Averages(results))
    assert [row[1] for row in table.rows[:2]] == ["94.54 (95.20)", "90.00 (95.20)"]


def test_every_name_is_made(whole, network, tmp_path):
    """From a real benchmark's folder, each name gives something that is not empty."""
    assert set(NAMES) == {*TABLES, *FIGURES, "timing"}
    for name in NAMES:
        text = make(name, whole, out=tmp_path, networks=[network])
        assert "resnet-10-16" in text or name in ("toy", "curves", "input-steps"), name
    stem = "resnet-10-16-cifar-10"
    assert MISSING not in find(TABLES["adversarial"](Averages(whole))[0], "resnet-10-16")
    drawn = sorted(path.stem for path in tmp_path.glob("*.png"))
    assert drawn == ["curves", f"gaussianity-{stem}", f"histograms-{stem}", f"layers-{stem}", "toy"]


def test_the_reports_averages_are_over_sets_that_all_rows_have(results):
    results.cells.append(cell(method="msp", ood="svhn", tnr=0.9))
    ours = Averages(results)
    standing = standings(ours, ours.classifiers()[0])
    rates = {row.method: standing.average(row) for row in standing.rows if row.setting == "black-box"}
    assert standing.compared == ["tiny-imagenet"]
    assert rates == pytest.approx({"msp": 50.0, "odin": 60.0, "energy": 70.0, "igeood-logits": 80.0})


def test_options_of_a_method_have_tables_of_their_own_and_are_left_out_of_all_others(results):
    both, predicted = {"ood_sigma": "both"}, {"ood_sigma": "both", "ood_means": "predicted"}
    for options, tnr in ((both, 0.3), (predicted, 0.4), ({}, 0.5)):
        results.cells.append(cell("white-box-fgsm", "igeood+", "fgsm", "tiny-imagenet", tnr=tnr, options=options))
    for how, tnr in (({"options": {"solver": "sgd"}}, 0.11), ({"search": "bayes"}, 0.12), ({"search": "sweep"}, 0.13)):
        results.cells.append(cell(method="igeood-logits", tnr=tnr, **how))
    ours = Averages(results)
    fgsm = next(table for table in TABLES["equation-12"](ours) if "fgsm" in table.title)
    assert [row[1:] for row in fgsm.rows] == [[v] * 2 for v in ("50.0", "30.0", "40.0", "94.5")]
    [table] = TABLES["centroids"](ours)
    assert [row[1] for row in table.rows] == ["13.0", MISSING, "11.0", "12.0", "99.9"]
    results.cells.append(cell(method="igeood-logits-sgd", tnr=0.14))  # the form's own method
    assert TABLES["centroids"](Averages(results))[0].rows[2][1] == "14.0"
    assert ours.value("black-box", Key(**DENSENET), "gaussian", "igeood-logits", "tnr") == pytest.approx(13.0)


def test_minimum_and_sum_over_classes_from_kept_outputs(whole):
    [table], ours = reduction(Averages(whole)), Averages(whole)
    [line] = ours.networks
    train, known = (kept(ours, line, part) for part in ("train", "test"))
    scorer, row = IgeoodFeatures().fit(train), find(table, "Gaussian")
    noise = kept(ours, next(c for c in ours.cells if c["ood"] == "gaussian"), "ood")
    for i, layer in enumerate(scorer.term_names):
        mean, std = scorer.mean_[layer], scorer.std_[layer]
        distances = [gaussian.distance(o.features[layer][:, None].double(), std, mean, std) for o in (known, noise)]
        for j, reduce in enumerate((torch.amin, torch.sum)):
            tnr = tnr_at_tpr(*(reduce(d, dim=1) for d in distances))
            assert row[1 + 2 * i + j] == f"{100 * tnr:.1f}"


UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
NUMBER = re.compile(r"(-?\d+(?:\.\d+)?(?:e[+-]\d+)?)(?: (s|ms|µs)\b)?")


@pytest.mark.parametrize("measured", [False, True])
def test_every_number_of_the_paper_is_in_the_table_it_belongs_to(results, tmp_path, measured):
    """Each as often as the paper prints it, deviations too; ours are made up, and have a number that it has not."""
    if measured:
        for record in results.cells.records:
            record.update(tnr=0.00321, auroc=0.00321, aupr=0.00321)
        results.networks.records[0] |= {"layers": [[layer, 1] for layer in "abcd"], "diagnostics": {}}
    with pytest.raises(InputError, match="name"):
        make("table-9", None, out=tmp_path)
    there: dict[str, Counter] = {}
    for name in [*TABLES, "timing"]:
        text = make(name, results if measured else None, out=tmp_path)
        for table in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
            label = re.search(r"The paper's `(.*)`", table)
            lines = [line for line in table.splitlines() if line.startswith("|")]
            cells = [c for line in lines[2:] for c in line.split("|")[2:] if MISSING in c or "(" in c or ";" in c]
            numbers = (float(f"{float(n) * UNITS.get(unit, 1.0):.6g}") for c in cells for n, unit in NUMBER.findall(c))
            there.setdefault(label[1] if label else name, Counter()).update(numbers)
    wanted: dict[str, Counter] = {}
    for one in load():
        values = [one.value] if one.spread is None else [one.value, one.spread]
        wanted.setdefault(one.label, Counter()).update(values)
    assert sum(len([*each.elements()]) for each in wanted.values()) > 2810
    assert {label: numbers - there.get(label, Counter()) for label, numbers in wanted.items()} == {
        label: Counter() for label in wanted
    }


def test_every_number_is_as_it_was_checked_and_of_a_method_that_is_there():
    assert sha256(repr(load()).encode()).hexdigest().startswith("a53a2dc9d5c6c42e")
    assert {one.method for one in load()} <= {*METHODS, ""}


def area(example, score, ood):
    return example.evaluations[score][ood].auroc


def test_what_the_example_claims():
    """Without OOD statistics the metric adds nothing; with them Mahalanobis does as well, near the best there is."""
    examples = [toy(seed) for seed in range(5)]
    for example in examples:
        found = {name: area(example, name, OOD_II) for name in example.evaluations}
        assert 0.4 <= found["mahalanobis"] <= 0.6
        assert found["fisher-rao-ood"] > 0.9
        assert area(example, "fisher-rao-ood", OOD_I) > area(example, "mahalanobis", OOD_I)
        assert example.evaluations["fisher-rao"] == example.evaluations["mahalanobis"]
        assert found["mahalanobis-ood"] == pytest.approx(found["fisher-rao-ood"], abs=0.01)
        assert found["likelihood-ratio"] == pytest.approx(found["fisher-rao-ood"], abs=0.01)
        assert found["mahalanobis"] < found["fisher-rao-ood-printed"] < found["fisher-rao-ood"]
        for ood in (OOD_I, OOD_II):  # no score is above the likelihood ratio's but by the draws' noise
            highest = max(area(example, name, ood) for name in example.evaluations)
            assert highest <= area(example, "likelihood-ratio", ood) + 0.005
    best = 0.5 * (1.0 + math.erf(TRUTH[OOD_I].mean / 2.0))  # Φ(Δ/(σ√2))
    assert np.mean([area(each, "likelihood-ratio", OOD_I) for each in examples]) == pytest.approx(best, abs=0.01)
    assert toy(0).evaluations == examples[0].evaluations != examples[1].evaluations
