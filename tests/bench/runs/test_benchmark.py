"""The benchmark: every cell once, from what was kept, and the same after any interruption."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made import make_plan
from safetensors.torch import save_file

import igeood
from igeood import datasets, storage
from igeood.benchmark import PAPER, SETTINGS, Lines, Plan, Results, load_network, run
from igeood.benchmark.observing import Observer, recall
from igeood.benchmark.plan import cells
from igeood.errors import InputError
from igeood.files import only_one
from igeood.metrics import evaluate
from igeood.networks import build

QUICK = {"settings": ("black-box", "white-box"), "methods": ("energy", "igeood"), "splits": 1}


def test_every_cell_is_there_once(whole, world):
    plan = make_plan(world)
    found = Counter((c["setting"], c["method"], c["validation"], c["ood"], c["seed"]) for c in whole.cells.records)
    wanted = {(c.setting, c.method, c.validation, c.ood, c.seed) for c in cells(plan, "cifar-10")}
    assert set(found) == wanted
    assert set(found.values()) == {1}
    by_setting = Counter(c["setting"] for c in whole.cells.records)
    assert by_setting == {"black-box": 14, "grey-box": 6, "white-box": 6, "white-box-fgsm": 6}
    assert {c["method"] for c in whole.cells.records} == set(igeood.METHODS)


def test_records_have_what_it_takes_to_redo_them(whole):
    for cell in whole.cells.records:
        assert cell["weights"] == whole.networks.records[0]["weights"]
        assert set(cell["data"]) >= {"train", "test", "ood"}
        _, scores = storage.read(whole.folder / "scores" / cell["scores"], "scores")
        again = evaluate(scores["id"], scores["ood"], cell["tpr"])
        assert (again.tnr_at_tpr, again.auroc, again.aupr) == (cell["tnr"], cell["auroc"], cell["aupr"])
        assert (len(scores["id"]), len(scores["ood"])) == (cell["id_images"], cell["ood_images"])
    grey = [c for c in whole.cells.records if c["setting"] == "grey-box"]
    assert all(c["limit"] == 20 == c["ood_images"] == c["id_images"] for c in grey)


def test_a_cell_is_what_the_library_gives(whole, world, network):
    """A black-box cell by hand: extraction, fit, score, evaluation."""
    cell = next(c for c in whole.cells.records if (c["setting"], c["method"]) == ("black-box", "igeood-logits"))
    observer = Observer(network, whole.folder / "outputs")
    train, test = (datasets.load("cifar-10", root=world, split=split) for split in ("train", "test"))
    detector = igeood.IgeoodLogits(temperature=cell["temperature"]).fit(observer.outputs(train, "train"))
    rows = np.sort(np.random.default_rng(0).permutation(80)[40:])
    inside = observer.outputs(test.limited(80))[torch.from_numpy(rows)]
    outside = observer.outputs(datasets.load(cell["ood"], root=world, limit=80))
    assert evaluate(detector.score(inside), detector.score(outside)).auroc == cell["auroc"]


def test_validation_and_measurement_share_nothing(whole):
    for cell in whole.cells.records:
        assert cell["validation"] != cell["ood"]
        if cell["setting"] == "white-box":
            assert cell["ood_images"] in (30, 40)  # half of 60 and of 80; the other half was to tune on
        assert cell["id_images"] == (20 if cell["setting"] == "grey-box" else 40)  # of 80, 40 were to tune on


def test_nothing_is_done_twice(whole, world, network, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(Observer, "_batches", lambda *_: pytest.fail("the network ran again"))
    run([network], make_plan(world), whole.folder, root=world)
    assert before == {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*") if path.is_file()}


def test_from_kept_outputs_the_network_does_not_run(whole, world, network, monkeypatch, tmp_path):
    shutil.copytree(whole.folder / "outputs", tmp_path / "outputs")
    monkeypatch.setattr(Observer, "_batches", lambda *_: pytest.fail("the network ran again"))
    again = run([network], make_plan(world), tmp_path, root=world)
    assert again.cells.path.read_bytes() == whole.cells.path.read_bytes()
    assert again.tunings.path.read_bytes() == whole.tunings.path.read_bytes()


def test_other_options_make_other_cells(whole, world, network, tmp_path):
    shutil.copytree(whole.folder, tmp_path / "r")
    more = run(
        [network], make_plan(world, limit=25, settings=("grey-box",), methods=("odin",)), tmp_path / "r", root=world
    )
    new = more.cells.records[len(whole.cells.records) :]
    assert {(c["setting"], c["method"], c["limit"], c["ood_images"]) for c in new} == {("grey-box", "odin", 25, 25)}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.slow] * (i > 3)) for i in range(20)])
def test_broken_off_at_any_write(world, network, whole, tmp_path, monkeypatch, seed):
    """Twenty runs, each broken off at random writes until it is through: the same file as the unbroken run."""
    plan = make_plan(world, **QUICK)
    shutil.copytree(whole.folder / "outputs", tmp_path / "outputs")
    for path in random.Random(seed).sample(sorted((tmp_path / "outputs").rglob("*.safetensors")), 3):
        path.unlink()
    draw = random.Random(seed)
    write, append = storage.write, Lines.append
    monkeypatch.setattr(storage, "write", lambda *a: (draw.random() < 0.3 and stop(None)) or write(*a))
    monkeypatch.setattr(
        Lines, "append", lambda lines, record: (draw.random() < 0.3 and stop(lines)) or append(lines, record)
    )

    def stop(lines):
        if lines is not None and draw.random() < 0.5:  # half of a line is on disk already
            with lines.path.open("a") as file:
                file.write('{"half": "a li')
        raise Killed

    for _ in range(200):
        try:
            results = run([network], plan, tmp_path, root=world)
            break
        except Killed:
            pass
    lines = whole.cells.path.read_text().splitlines(keepends=True)
    wanted = [line for line in lines if _is_quick(json.loads(line))]
    assert results.cells.path.read_text() == "".join(wanted)
    assert Results(tmp_path).cells.records == [json.loads(line) for line in wanted]


def _is_quick(cell):
    return cell["setting"] in QUICK["settings"] and cell["method"] in QUICK["methods"] and cell["seed"] == 0


def kill_until_done(world, out, changes, times, seed):
    """Kill the benchmark `times` times, each after a random number of new results, then let it end.

    Gives the results of an unbroken run and of this one, and how many results there were at each kill.
    """
    command = [sys.executable, str(Path(__file__).parent / "made.py"), str(world), str(out), json.dumps(changes)]
    results = out / "results.jsonl"
    subprocess.run(command, check=True)
    wanted = results.read_bytes()
    shutil.rmtree(out)
    draw, at = random.Random(seed), []

    def count():
        return results.read_bytes().count(b"\n") if results.exists() else 0

    for _ in range(times):
        goal = count() + draw.randint(0, 2)
        process = subprocess.Popen(command)
        while process.poll() is None and count() < goal:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 4.0) if goal == count() == 0 else draw.uniform(0.0, 0.2))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:  # it has not ended by itself
            at.append(count())
    subprocess.run(command, check=True)
    return wanted, results.read_bytes(), at


def test_killed_and_resumed(world, tmp_path):
    wanted, found, killed = kill_until_done(world, tmp_path / "out", QUICK, times=2, seed=1)
    assert len(killed) == 2
    assert found == wanted


@pytest.mark.slow
def test_killed_twenty_times_and_resumed(world, tmp_path):
    wanted, found, killed = kill_until_done(world, tmp_path / "out", {"splits": 1}, times=20, seed=0)
    assert len(killed) == 20
    assert len(set(killed)) > 5  # not all before the first result
    assert found == wanted


def test_two_processes_on_one_folder(world, network, tmp_path):
    with only_one(tmp_path / ".lock", "out"), pytest.raises(InputError, match="another process is writing there"):
        run([network], make_plan(world, **QUICK), tmp_path, root=world)


def test_a_damaged_shard_is_made_again(world, network, whole, tmp_path, caplog):
    shutil.copytree(whole.folder / "outputs", tmp_path / "outputs")
    for path in (tmp_path / "outputs").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-7])
    again = run([network], make_plan(world, **QUICK), tmp_path, root=world)
    wanted = [c for c in whole.cells.records if _is_quick(c)]
    assert [c["tnr"] for c in again.cells.records] == [c["tnr"] for c in wanted]
    assert "it is made again" in caplog.text


def test_a_full_disk_keeps_finished_work(world, network, tmp_path, monkeypatch):
    run([network], make_plan(world, **{**QUICK, "methods": ("energy",)}), tmp_path, root=world)
    before = (tmp_path / "results.jsonl").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run([network], make_plan(world, **QUICK), tmp_path, root=world)
    monkeypatch.undo()
    assert (tmp_path / "results.jsonl").read_bytes() == before
    assert not list(tmp_path.rglob("*.part"))


def test_recall_finds_what_was_kept(whole, network, world):
    digest = next(c["data"]["ood"] for c in whole.cells.records if c["ood"] == "gaussian")
    found = recall(whole.folder / "outputs", weights=network.weights, images=digest)
    assert len(found) == 80
    assert list(found.features) == ["relu", "layer1", "layer2", "layer3", "layer4"]
    assert recall(whole.folder / "outputs", weights="none", images=digest) is None
    assert recall(whole.folder / "outputs", weights=network.weights, images="none") is None


def test_the_networks_line(whole):
    [line] = whole.networks.records
    assert dict(line["layers"]) == {"relu": 16, "layer1": 16, "layer2": 32, "layer3": 64, "layer4": 128}
    assert (line["train_images"], line["test_images"]) == (200, 80)
    assert line["notes"] == ["train: 200 of 50,000 images", "test: 160 of 10,000 images"]
    assert 0 <= line["accuracy"] <= 1


def test_without_validation_the_defaults_stay(world, network, whole, tmp_path):
    shutil.copytree(whole.folder / "outputs", tmp_path / "outputs")
    plan = make_plan(world, validation=(), settings=("black-box", "grey-box"), methods=("odin", "igeood-logits"))
    found = run([network], plan, tmp_path, root=world).cells.records
    assert {(c["method"], c["temperature"]) for c in found} == {("odin", 1000.0), ("igeood-logits", 1.0)}
    assert {(c["setting"], c["epsilon"]) for c in found} == {("black-box", 0.0), ("grey-box", 0.0012)}


def test_lines_that_are_no_json(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"a": 1}\nnonsense\n{"b": 2}\n')
    with pytest.raises(InputError, match=r"results.jsonl: line 2 is no JSON object"):
        Results(tmp_path)
    with pytest.raises(InputError, match=r"igeood bench --out"):
        Results.existing(tmp_path / "none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": ("red-box",)}, "settings: no 'red-box'"),
        ({"methods": ("magic",)}, "methods: no 'magic'"),
        ({"ood": ()}, "ood: name at least one"),
        ({"splits": 0}, "splits: must be at least 1"),
    ],
)
def test_plans_that_cannot_be(world, changes, message):
    with pytest.raises(InputError, match=message):
        make_plan(world, **changes)


def test_networks_that_do_not_say_what_they_are(tmp_path, world):
    path = tmp_path / "w.safetensors"
    save_file(build("resnet-10-16", 7).state_dict(), path)
    with pytest.raises(InputError, match="does not say what it is; give NAME:"):
        load_network(str(path))
    with pytest.raises(InputError, match="does not say what it was trained on"):
        load_network(f"resnet-10-16:{path}")
    with pytest.raises(InputError, match="did you mean 'resnet-10-16'"):
        load_network(f"resnet-1016:{path}", in_distribution="cifar-10")
    with pytest.raises(InputError, match=r"says that it was trained on cifar-10, not svhn"):
        load_network(str(world / "net.safetensors"), in_distribution="svhn")
    found = load_network(f"resnet-10-16:{path}", in_distribution="cifar-10")
    assert (found.name, found.mean) == ("resnet-10-16", (0.4914, 0.4822, 0.4465))
    about = {"network": "resnet-10-16", "trained_on": "svhn", "mean": "a,b,c", "std": "1,1,1"}
    save_file(build("resnet-10-16", 7).state_dict(), tmp_path / "odd.safetensors", about)
    with pytest.raises(InputError, match=r"odd.safetensors says mean='a,b,c'; expected numbers"):
        load_network(str(tmp_path / "odd.safetensors"))
    assert found.model(torch.zeros(1, 3, 32, 32)).shape == (1, 7)
    with pytest.raises(InputError, match="of another architecture"):
        load_network(f"resnet-34:{path}", in_distribution="cifar-10")


def test_splits_are_cells_of_their_own(world):
    plan = make_plan(world, splits=3, settings=("white-box", "black-box"), methods=("igeood", "msp"))
    found = Counter((c.setting, c.seed) for c in cells(plan, "cifar-10"))
    assert found == {("white-box", 0): 2, ("white-box", 1): 2, ("white-box", 2): 2, ("black-box", 0): 2}


def test_a_network_is_not_tuned_on_what_it_knows(world, network, tmp_path):
    with pytest.raises(InputError, match=r"validation: cifar-10 is what net.safetensors was trained on"):
        run([network], make_plan(world, validation=("cifar-10",)), tmp_path, root=world)


def test_a_set_is_not_measured_under_another_name(world, network, tmp_path):
    blue = world / "blue"
    plan = make_plan(world, ood=(f"folder:{blue}/",), validation=(f"folder:{world}/red/../blue",), **QUICK)
    assert plan.ood == plan.validation == (f"folder:{blue}",)
    assert not [c for c in cells(plan, "cifar-10") if c.setting == "black-box"]
    shutil.copytree(blue, tmp_path / "copy")
    plan = make_plan(world, ood=(f"folder:{tmp_path / 'copy'}",), **QUICK)
    (tmp_path / "copy" / "000.png").unlink()
    with pytest.raises(InputError, match=r"59 images of folder:.*copy are also in folder:.*blue, which was tuned on"):
        run([network], plan, tmp_path / "r", root=world)


def test_what_cannot_be_measured_is_said_before_the_network_runs(world, network, tmp_path, monkeypatch):
    monkeypatch.setattr(Observer, "_batches", lambda *_: pytest.fail("the network ran"))
    for changes, message in (
        ({"ood": ("gaussian",), "validation": ("gaussian",), "settings": ("black-box",)}, "nothing to measure"),
        ({"methods": ("igeood",), "settings": ("black-box",)}, "nothing to measure"),
        ({"ood": ("cifar-10",)}, "nothing to measure"),
        ({"ood": ("gaussian", "tinyimagenet")}, "did you mean tiny-imagenet"),
        ({"ood": (f"folder:{tmp_path}",)}, "no image files"),
    ):
        with pytest.raises(InputError, match=message):
            run([network], make_plan(world, **changes), tmp_path / "r", root=world)
    (tmp_path / "few").mkdir()
    for path in sorted((world / "red").iterdir())[:5]:
        shutil.copy(path, tmp_path / "few")
    with pytest.raises(InputError, match=r"few has 5 images; tuning on it needs at least 20"):
        run([network], make_plan(world, ood=(f"folder:{tmp_path / 'few'}",)), tmp_path / "r", root=world)


def test_another_normalisation_is_another_cell(world, whole, network, tmp_path):
    shutil.copytree(whole.folder, tmp_path / "r")
    other = replace(network, mean=(0.1, 0.2, 0.3))
    more = run([other], make_plan(world, **QUICK), tmp_path / "r", root=world)
    assert len(more.cells.records) == len(whole.cells.records) + 4
    assert more.cells.records[-1]["mean"] == [0.1, 0.2, 0.3]


def test_settings_are_all_of_them():
    assert Plan(ood=("gaussian",)).settings == PAPER
    assert set(SETTINGS) == {*PAPER, "white-box-validation"}
