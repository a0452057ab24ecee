"""The benchmark: every cell once, tuned as a guard is, from what was kept; the same after any stop; its networks."""

import random
import shutil
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import igeood
from igeood.bench import datasets
from igeood.bench.methods.deconf import EPSILONS
from igeood.bench.networks import build
from igeood.bench.runs import Lines, Network, Plan, Results, cells, load_network, run
from igeood.bench.runs.observing import Observer
from igeood.bench.runs.plan import cells as planned
from igeood.detectors import METHODS
from igeood.errors import InputError
from igeood.files import only_one, read_record, write_record
from igeood.metrics import evaluate
from igeood.summary import Summary

QUICK = {"settings": ("black-box", "white-box"), "methods": ("energy", "igeood")}


def is_quick(cell):
    return cell["setting"] in QUICK["settings"] and cell["method"] in QUICK["methods"]


@pytest.fixture
def more(whole, world, plan, tmp_path):
    """Records that a further run adds to a copy of the results."""
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)

    def measure(network, **changes):
        n = len(Results(tmp_path).cells.records)
        return run([network], plan(**changes), tmp_path, root=world).cells.records[n:]

    return measure


def test_every_cell_is_there_once(whole, plan):
    assert sorted(np.concatenate(cells.halves(3000, 7))) == list(range(3000))
    splits = Plan(ood=("a", "b"), splits=3, settings=("white-box", "black-box"), methods=("igeood", "msp"))
    counts = Counter((c.setting, c.seed) for c in planned(splits, "cifar-10"))
    assert counts == {("white-box", 0): 2, ("white-box", 1): 2, ("white-box", 2): 2, ("black-box", 0): 2}
    places = Counter((c["setting"], c["method"], c["validation"], c["ood"], c["seed"]) for c in whole.cells.records)
    there = [cell for cell in planned(plan(), "cifar-10") if cell.method != "deconf-c"]  # for want of another head
    assert places == Counter(tuple(asdict(cell).values()) for cell in there)


def test_records_have_what_it_takes_to_redo_them_and_tuning_shares_nothing_with_measurement(whole):
    assert "Infinity" not in whole.networks.path.read_text()  # which is not JSON
    for cell in whole.cells.records:
        assert cell["weights"] == whole.networks.records[0]["weights"]
        assert cell["validation"] != cell["ood"]
        assert cell["setting"] != "white-box" or cell["ood_images"] in (30, 40)  # half of 60 and of 80
        assert cell["id_images"] == (25 if cell["setting"] == "grey-box" else 40)  # of 80, 40 were to tune on
        scores = read_record(whole.folder / "scores" / cell["scores"], "scores")[1]
        again = evaluate(scores["id"], scores["ood"], cell["tpr"])
        assert (again.tnr_at_tpr, again.auroc, again.aupr) == (cell["tnr"], cell["auroc"], cell["aupr"])
        for side in ("id", "ood"):
            torch.testing.assert_close(scores[f"{side}_parts"].double().sum(1), scores[side], rtol=1e-4, atol=1e-3)


def test_what_cells_share_is_what_each_would_compute(known):
    summary = Summary.of(known.train, METHODS["igeood"].needs)
    alone, shared = (igeood.detector("igeood").learn(summary) for _ in range(2))
    cells.share(shared)
    layers = shared.parts["layers"]
    with torch.no_grad():
        for outputs in (known.test, known.ood, known.test[:50], known.test):
            assert torch.equal(shared.terms(outputs), alone.terms(outputs))
        assert layers.terms(known.test[:50]) is layers.terms(known.test[:50])
    tempered = shared.at_temperature(2.0, summary)
    assert shared.at_temperature(2.0, summary).softmax is tempered.softmax
    assert torch.equal(tempered.terms(known.ood), alone.at_temperature(2.0, summary).terms(known.ood))
    moving = known.test.replace(features={k: v.clone().requires_grad_() for k, v in known.test.features.items()})
    layers.terms(moving).sum().backward()  # as in the input step
    assert all(value.grad.abs().sum() > 0 for value in moving.features.values())


@pytest.mark.filterwarnings("ignore:ood. ")  # the network is not trained
@pytest.mark.parametrize(
    ("setting", "method"), [("black-box", "odin"), ("black-box", "igeood-logits"), ("white-box", "igeood+")]
)
def test_a_cell_is_what_a_guard_does(whole, world, network, setting, method):
    """A guard on the kept outputs, tuned on the same images, has the cell's temperature, step and scores."""
    cell = next(c for c in whole.cells.records if (c["setting"], c["method"]) == (setting, method))
    observer, needs = Observer(network, whole.folder / "outputs"), igeood.METHODS[method].needs
    train, test = (datasets.load("cifar-10", root=world, split=split) for split in ("train", "test"))
    sets = (test.limited(80), datasets.load(cell["ood"], root=world, limit=80))
    inside, outside = (observer.outputs(images, needs) for images in sets)
    tuned_on, measured = (torch.from_numpy(rows) for rows in cells.halves(80, 0))
    guard = (igeood.black_box if setting == "black-box" else igeood.white_box)(method=method)
    guard.fit(observer.outputs(train, needs, "train"))
    if setting == "black-box":
        foreign = observer.outputs(datasets.load(cell["validation"], root=world), needs, "validation")
    else:
        halves = [torch.from_numpy(rows) for rows in cells.halves(len(outside), 0)]
        foreign, outside = outside[halves[0]], outside[halves[1]]
    guard.tune(inside[tuned_on], foreign, share=1.0)
    assert guard.detector.params()["temperature"] == cell["temperature"]
    scores = read_record(whole.folder / "scores" / cell["scores"], "scores")[1]
    torch.testing.assert_close(torch.as_tensor(guard.score(inside[measured])), scores["id"])
    torch.testing.assert_close(torch.as_tensor(guard.score(outside)), scores["ood"])


@pytest.mark.parametrize("method", ["igeood", "mahalanobis"])
def test_the_white_boxs_step_is_a_guards(more, tmp_path, world, network, method, monkeypatch):
    """A guard with the model, tuned on the same images with the same sizes, finds the same step and scores."""
    monkeypatch.setattr("igeood.bench.runs.cells.STEPS", {"white-box-step": (0.0, 0.03)})
    cell = more(network, settings=("white-box-step",), methods=(method,), limit=100)[0]
    sets = [datasets.load(name, root=world, limit=80) for name in ("cifar-10", cell["ood"])]
    rows = [cells.halves(len(images), 0) for images in sets]
    tuned_on, measured = ([network.batches(s[r[i]], 25) for s, r in zip(sets, rows, strict=True)] for i in (0, 1))
    guard = igeood.white_box(network.model, method=method, std=network.std)
    guard.fit(network.batches(datasets.load("cifar-10", root=world, split="train"), 25))
    guard.tune([*tuned_on[0]], [*tuned_on[1]], share=1.0, epsilons=(0.0, 0.03))
    assert guard.epsilon == cell["epsilon"]
    scores = [torch.as_tensor(guard.score([*batches][:1])) for batches in measured]
    kept = read_record(tmp_path / "scores" / cell["scores"], "scores")[1]
    for mine, side in zip(scores, ("id", "ood"), strict=True):
        torch.testing.assert_close(mine, kept[side][: len(mine)], rtol=1e-4, atol=1e-4)


def test_other_options_and_normalisations_make_other_cells(network, more):
    adversarial = {"settings": ("white-box-fgsm",), "methods": ("igeood+",), "ood": ("gaussian",), "images": 60}
    [train] = more(network, **adversarial)
    [test] = more(network, **adversarial, attacked="test")
    [reading] = more(network, **adversarial, options={"ood_sigma": "both"})
    assert (train["attacked"], test["attacked"], reading["options"]) == ("train", "test", {"ood_sigma": "both"})
    assert len({c["scores"] for c in (train, test, reading)}) == 3
    cells = more(replace(network, mean=(0.1, 0.2, 0.3)), settings=("black-box",), methods=("msp",))
    assert [c["mean"] for c in cells] == [[0.1, 0.2, 0.3]] * 2
    cells = more(network, validation=(), settings=("black-box", "grey-box"), methods=("odin", "igeood-logits"))
    assert {(c["method"], c["temperature"]) for c in cells} == {("odin", 1000.0), ("igeood-logits", 1.0)}
    assert {(c["setting"], c["epsilon"]) for c in cells} == {("black-box", 0.0), ("grey-box", 0.0012)}


def test_nothing_is_done_twice(whole, world, network, plan, monkeypatch, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(Network, "batches", lambda *_: pytest.fail("the network ran again"))
    run([network], plan(), whole.folder, root=world)
    assert before == {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*") if path.is_file()}
    shutil.copytree(whole.folder / "outputs", tmp_path / "outputs")
    with only_one(tmp_path / ".lock", "out"), pytest.raises(InputError, match="out"):
        run([network], plan(**QUICK), tmp_path, root=world)
    again = run([network], plan(**QUICK), tmp_path, root=world)
    assert again.cells.records == [c for c in whole.cells.records if is_quick(c)]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.slow] * (i > 0)) for i in range(20)])
def test_broken_off_at_any_write(world, network, plan, whole, tmp_path, monkeypatch, seed):
    """Twenty runs, each broken off at random writes until it is through: the same file as the unbroken run."""
    shutil.copytree(whole.folder / "outputs", tmp_path / "outputs")
    draw = random.Random(seed)
    missing, *damaged = draw.sample(sorted((tmp_path / "outputs").rglob("*.safetensors")), 3)
    missing.unlink()
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-7])
    append = Lines.append

    def stop(lines=None):
        if lines is not None and draw.random() < 0.5:  # half of a line is on disk already
            with lines.path.open("a") as file:
                file.write('{"half": "a li')
        raise Killed

    for module in ("cells", "observing"):
        monkeypatch.setattr(
            f"igeood.bench.runs.{module}.write_record", lambda *a: (draw.random() < 0.3 and stop()) or write_record(*a)
        )
    monkeypatch.setattr(Lines, "append", lambda lines, r: (draw.random() < 0.3 and stop(lines)) or append(lines, r))
    for _ in range(200):
        try:
            results = run([network], plan(**QUICK), tmp_path, root=world)
            break
        except Killed:
            pass
    wanted = [c for c in whole.cells.records if is_quick(c)]
    assert results.cells.records == Results(tmp_path).cells.records == wanted


def test_a_set_is_not_measured_under_another_name(world, network, plan, tmp_path):
    blue = world / "blue"
    same = plan(ood=(f"folder:{blue}/",), validation=(f"folder:{world}/red/../blue",), **QUICK)
    assert same.ood == same.validation == (f"folder:{blue}",)
    assert not [c for c in planned(same, "cifar-10") if c.setting == "black-box"]
    shutil.copytree(blue, tmp_path / "copy")
    (tmp_path / "copy" / "000.png").unlink()
    with pytest.raises(InputError, match="59 images"):
        run([network], plan(ood=(f"folder:{tmp_path / 'copy'}",), **QUICK), tmp_path / "r", root=world)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ood": ("gaussian",), "validation": ("gaussian",), "settings": ("black-box",)},  # validated on itself
        {"ood": ("cifar-10",)},  # in-distribution
        {"ood": ("gaussian", "tinyimagenet")},
        {"validation": ("cifar-10",)},
        {"ood": ("folder:few",)},  # too few images
        {"settings": ("red-box",)},
        {"methods": ("magic",)},
    ],
)
def test_what_cannot_be_measured_is_an_error_first(world, network, plan, tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(Network, "batches", lambda *_: pytest.fail("the network ran"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few").mkdir()
    for path in sorted((world / "red").iterdir())[:5]:
        shutil.copy(path, tmp_path / "few")
    with pytest.raises(InputError):
        run([network], plan(**wrong), tmp_path / "r", root=world)


def test_every_method_is_measured_on_all_test_images(world, network, plan, tmp_path):
    names = ("msp", "evidence", "react", "gram")
    cells = run([network], plan(settings=("untuned",), methods=names), tmp_path, root=world).cells.records
    assert {(c["method"], c["validation"], c["id_images"]) for c in cells} == {(name, "none", 80) for name in names}
    untuned = {name for name, method in METHODS.items() if method.tunes != "only"}
    assert {cell.method for cell in planned(plan(settings=("untuned",)), "cifar-10")} == untuned


def test_deconf_chooses_its_step_on_in_distribution_images(world, network, plan, tmp_path):
    torch.manual_seed(0)
    about = {"network": "resnet-10-16", "head": "deconf-c", "trained_on": "cifar-10"}
    save_file(build("resnet-10-16", head="deconf-c").state_dict(), tmp_path / "net.safetensors", about)
    deconf = load_network(str(tmp_path / "net.safetensors"))
    grey = plan(settings=("grey-box", "untuned"), methods=("deconf-c", "energy"), validation=("none",))
    results = run([deconf], grey, tmp_path / "out", root=world)
    assert {c["network"] for c in results.cells.records} == {"resnet-10-16 deconf-c"}
    record = next(t for t in results.tunings.records if (t["setting"], t["method"]) == ("grey-box", "deconf-c"))
    means = {step["epsilon"]: step["mean_score"] for step in record["tuning"]["steps"]}
    assert tuple(means) == EPSILONS
    assert means[record["epsilon"]] == min(means.values())
    with pytest.raises(InputError):  # a network without the head
        run([network], grey, tmp_path / "other", root=world)


@pytest.fixture
def path(tmp_path):
    """Weights that say nothing of themselves."""
    save_file(build("resnet-10-16", 7).state_dict(), tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def test_a_network_is_what_its_file_and_the_user_say(path):
    network = load_network(f"resnet-10-16:{path}", in_distribution="cifar-10")
    assert (network.name, network.mean) == ("resnet-10-16", (0.4914, 0.4822, 0.4465))
    about = {"network": "resnet-10-16", "head": "deconf-c", "trained_on": "mine", "mean": "0.1,0.2,0.3", "std": "1,1,1"}
    save_file(build("resnet-10-16", 7, head="deconf-c").state_dict(), path, about)
    network = load_network(str(path))
    assert (network.name, network.mean) == ("resnet-10-16 deconf-c", (0.1, 0.2, 0.3))
    assert network.model(torch.zeros(1, 3, 32, 32))["h"].shape == (1, 7)


@pytest.mark.parametrize(
    ("spec", "trained_on", "argument"),
    [
        ("{}", None, "network"),
        ("resnet-10-16:{}", None, "in_distribution"),
        ("resnet-10-16:{}", "mine", "network"),  # nobody says how its inputs are normalised
        ("resnet-1016:{}", "cifar-10", "network"),
        ("resnet-34:{}", "cifar-10", "weights"),
    ],
)
def test_what_a_network_must_say(path, spec, trained_on, argument, refused):
    with refused(argument):
        load_network(spec.format(path), in_distribution=trained_on)


def test_a_network_of_ones_own(world, tmp_path, monkeypatch, refused):
    source = 'from igeood.bench.networks import build\n\nmake = lambda: build("resnet-10-16")\n'
    (tmp_path / "own_nets.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    weights = load_network(str(world / "net.safetensors")).model.state_dict()
    torch.save(weights, tmp_path / "w.pt")
    network = load_network("own_nets:make", weights=tmp_path / "w.pt", in_distribution="cifar-10")
    assert (network.name, network.file, network.size) == ("own_nets:make", "w.pt", 32)
    assert all(torch.equal(value, weights[name]) for name, value in network.model.state_dict().items())
    with refused("in_distribution"):  # what was it trained on?
        load_network("own_nets:make", weights=tmp_path / "w.pt")
