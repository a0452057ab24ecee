"""The paper's tables: our numbers where they belong, the paper's beside them, and what is missing as missing."""

from statistics import fmean

import pytest

from igeood.bench.paper.catalog import NAMES, make
from igeood.bench.paper.plots import FIGURES
from igeood.bench.paper.tables import MISSING, TABLES, accuracy, averages, extended, hyperparameters
from igeood.bench.runs import Results
from igeood.bench.runs.averages import Averages, Key
from igeood.errors import InputError

DENSENET = {"network": "densenet-bc-100", "in_distribution": "cifar-10"}
NETWORK = {"accuracy": 0.9454, "accuracy_fisher_rao": 0.9453, "test_images": 10000, "data": {"test": "t"}}


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
    tnr, auroc, aupr = extended(Averages(results), "tab:black_box_extended")
    assert find(tnr, "Tiny") == ["Tiny-ImageNet", "50.0 (59.4)", "60.0 (85.0)", "70.0 (88.0)", "**80.0** (87.8)"]
    assert find(tnr, "Gaussian")[1] == "20.0 (88.1)"
    assert find(tnr, "SVHN") == ["SVHN", *(f"{MISSING} ({v:.1f})" for v in (40.4, 52.0, 49.6, 50.1))]
    both = [f"35.0 ({fmean([88.1, 59.4]):.1f})", f"45.0 ({fmean([99.8, 85.0]):.1f})"]
    assert find(tnr, "mean, sets: 2")[1:3] == both
    assert find(auroc, "Tiny")[1] == "75.0 (94.1)"
    assert find(aupr, "Tiny")[1] == "80.0 (95.4)"
    table = averages(Averages(results), "black-box", "tab:black_box_avg")
    assert len(table.rows) == 6
    means = ["35.0 ± 15 (52.5 ± 16)", "45.0 ± 15 (66.8 ± 20)", "55.0 ± 15 (65.3 ± 23)", "**65.0** ± 15 (65.6 ± 23)"]
    assert find(table, "densenet-bc-100, CIFAR-10")[1:6] == ["2", *means]
    assert find(table, "resnet-34, SVHN")[1:3] == [MISSING, f"{MISSING} (76.2 ± 8)"]
    assert "9,000 in-distribution images; Gaussian noise 1,000, Tiny-ImageNet 1,000" in table.markdown()


def test_means_are_over_sets_that_all_methods_have_and_other_options_are_not_mixed_in(results):
    """As after an interruption: one method has a set more."""
    results.cells.append(cell(method="msp", ood="svhn", tnr=0.9))
    results.cells.append(cell(method="msp", ood="textures", tnr=0.9, data={"test": "few", "ood": "x"}))
    ours = Averages(results)
    assert ours.ood("black-box") == ["gaussian", "tiny-imagenet", "svhn"]
    table = averages(ours, "black-box", "tab:black_box_avg")
    assert table.rows[0][1:3] == ["2", "35.0 ± 15 (52.5 ± 16)"]
    assert "1 results of other options, or measured again, are not shown." in table.notes
    table = extended(ours, "tab:black_box_extended")[0]
    assert find(table, "SVHN")[1] == "90.0 (40.4)"
    assert find(table, "mean, sets: 2")[1].startswith("35.0 ")


def test_another_validation_set_splits_that_are_averaged_and_cells_that_are_replaced(results):
    results.cells.append(cell(validation="svhn", method="msp", ood="gaussian", tnr=0.9))
    ours, key = Averages(results), Key(**DENSENET)
    assert ours.validation == "isun"
    with pytest.raises(InputError, match=r"validation: no results tuned on 'lsun'; there are isun, svhn"):
        Averages(results, "lsun")
    assert Averages(results, "svhn").value("black-box", key, "gaussian", "msp", "tnr") == pytest.approx(90.0)
    [table] = TABLES["validation-choice"](ours)
    assert find(table, "SVHN")[2] == "90.0 (55.4)"
    assert find(table, "iSUN")[2] == "35.0 (52.5)"
    assert find(table, "Textures")[2] == f"{MISSING} (55.4)"
    results.cells.append(cell(method="msp", ood="gaussian", tnr=0.9))  # measured again
    ours = Averages(results)
    assert ours.value("white-box", key, "tiny-imagenet", "igeood+", "tnr") == pytest.approx(70.0)
    assert ours.value("black-box", key, "gaussian", "msp", "tnr") == pytest.approx(90.0)


def test_hyperparameters_and_accuracy_and_trainings_that_are_averaged_and_have_rows_of_their_own(results):
    [table] = hyperparameters(Averages(results))
    assert find(table, "densenet-bc-100, CIFAR-10")[1:4] == [f"{MISSING}; 1000", "2.5; 4.6", f"{MISSING}; 5.3"]
    assert find(table, "densenet-bc-100, CIFAR-10")[4] == f"{MISSING}; (1000, 0.0014)"
    [table] = accuracy(Averages(results))
    assert find(table, "densenet-bc-100, CIFAR-10")[1:] == ["94.54 (95.20)", "94.53 (95.20)", "10,000"]
    assert find(TABLES["seeds"](Averages(results))[0], "Gaussian")[1] == "20.0 (42.7 ± 49)"  # one has no spread
    results.networks.append({**DENSENET, **NETWORK, "weights": "w1", "file": "b.pt", "accuracy": 0.9})
    results.cells.append(cell(weights="w1", method="msp", ood="gaussian", tnr=0.4))
    tnr = TABLES["seeds"](Averages(results))[0]
    assert find(tnr, "Gaussian")[1] == "30.0 ± 10 (42.7 ± 49)"
    assert "Trainings of ours: 2" in tnr.notes[0]
    [table] = accuracy(Averages(results))
    rows = [f"densenet-bc-100, CIFAR-10 ({name}.pt)" for name in "ab"]
    assert [row[:2] for row in table.rows[:2]] == [[rows[0], "94.54 (95.20)"], [rows[1], "90.00 (95.20)"]]
    table = averages(Averages(results), "black-box", "tab:black_box_avg")
    assert [row[2].split(" ")[0] for row in table.rows[:2]] == ["35.0", "40.0"]


def test_every_name_is_made(whole, network, tmp_path):
    """From a real benchmark's folder, each name gives something that is not empty."""
    assert set(NAMES) == {*TABLES, *FIGURES, "timing"}
    for name in NAMES:
        text = make(name, whole, out=tmp_path, networks=[network])
        assert "resnet-10-16" in text or name in ("toy", "curves"), name
        assert "Nothing" not in text, name
    stem = "resnet-10-16-cifar-10"
    assert MISSING not in find(TABLES["adversarial"](Averages(whole))[0], "resnet-10-16")
    drawn = sorted(path.stem for path in tmp_path.glob("*.png"))
    assert drawn == ["curves", f"gaussianity-{stem}", f"histograms-{stem}", f"layers-{stem}", "toy"]


def test_without_results_only_the_paper_speaks(tmp_path):
    with pytest.raises(InputError, match=r"name: no 'table-9'; .*there are all, black-box"):
        make("table-9", None, out=tmp_path)
    texts = {name: make(name, None, out=tmp_path) for name in NAMES}
    assert all(text.startswith("###") for text in texts.values())
    assert f"| {MISSING} (95.20) |" in texts["accuracy"]
    assert f"| Textures (DTD) | {MISSING} (40.5) |" in texts["black-box"]
    assert f"{MISSING} (66 µs)" in texts["timing"]
    assert "| DeConf-C |" in texts["others"]
