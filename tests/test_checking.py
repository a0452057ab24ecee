"""`check`: shares that are kept, faults and their laws, OOD sets, and a report of any guard."""

import html
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import nn

import igeood
from igeood.checking import faults as catalogue
from igeood.checking.report import page
from igeood.cli import main
from igeood.model.batch import as_batch


@pytest.fixture(scope="module")
def guard(model, data):
    return igeood.white_box(model).fit(data.train).calibrate(data.held_out)


@pytest.fixture(scope="module")
def held_out(data):
    return data.images(300, 11)


@pytest.fixture(scope="module")
def checked(guard, held_out, data):
    return igeood.check(guard, held_out, {"half flipped": data.foreign})


class Bag(nn.Module):
    """A classifier of token ids, by the mean of their embeddings."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(42, 8), nn.Linear(8, 4)
        self.embedding.weight.data[:40, :4] += 3 * torch.eye(4).repeat_interleave(10, dim=0)
        self.head.weight.data[:, :4] += 2 * torch.eye(4)

    def forward(self, input_ids, attention_mask):
        weights = attention_mask[..., None].float()
        return self.head((self.embedding(input_ids) * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0))


def texts(n, seed, length=9):
    """Token ids between a first and a last one that all share, masked after 3 to 7 words; and their classes."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=draw)
    words = torch.randint(3, length - 1, (n,), generator=draw)
    ids = torch.randint(10, (n, length), generator=draw) + 10 * labels[:, None]
    places = torch.arange(length)
    ids[:, 0] = 40
    ids[torch.arange(n), words + 1] = 41
    return {"input_ids": ids, "attention_mask": (places <= words[:, None] + 1).long(), "labels": labels}


@pytest.fixture(scope="module")
def reader():
    """A guard of texts."""
    return igeood.black_box(Bag().eval()).fit([texts(600, 0)]).calibrate([texts(300, 1)])


# -- what is kept


def test_shares_are_those_of_the_verdicts_and_samples_seen_before_are_left_out(guard, held_out, data, checked):
    verdict = guard.predict(held_out[0])
    assert (checked.kept.n, checked.left_out) == (300, 0)
    assert checked.kept.kept == pytest.approx(1 - float(verdict.is_ood.float().mean()))
    for shares, column in ((checked.by_true, held_out[1]), (checked.by_predicted, verdict.label)):
        for share in shares:
            rows = column == int(share.name)
            assert share.n == int(rows.sum())
            assert share.kept == pytest.approx(1 - float(verdict.is_ood[rows].float().mean()))
            assert share.low <= share.kept <= share.high
    (foreign,) = checked.ood
    scores = [guard.score(part) for part in (held_out[0], data.foreign)]
    assert foreign.refused == pytest.approx(float(guard.predict(data.foreign).is_ood.float().mean()))
    assert foreign.auroc == pytest.approx(igeood.metrics.auroc(*scores))
    assert [len(part) for part in (foreign.least, foreign.most)] == [3, 3]
    again = igeood.check(guard, [*data.held_out, held_out], faults=None)
    assert (again.left_out, again.kept) == (400, checked.kept)


def test_a_class_that_is_kept_less_than_promised_is_marked(classifier, make):
    c = make(4, 4000, margin=6.0)
    guard = igeood.black_box().fit(c.train, c.labels).calibrate(c.held_out)
    bad = c.test.clone()
    bad[c.labels == 2] *= 0.6
    result = igeood.check(guard, (bad, c.labels))
    assert [share.name for share in result.by_true if share.below] == ["2"]
    assert result.no_faults
    assert not result.faults


# -- faults: laws


def test_laws_of_every_fault(checked, guard, held_out):
    assert [one.name for one in checked.faults] == list(catalogue.IMAGES)
    for one in checked.faults:
        assert not one.problem
        assert 0.0 <= one.silent <= min(one.changed, 1.0 - one.refused) + 1e-9
    by_name = {one.name: one for one in checked.faults}
    assert min(by_name[name].refused for name in ("× 255", "black", "white", "noise")) > 0.9
    nothing = igeood.check(guard, held_out, faults={"nothing": lambda x: x}).faults[0]
    assert (nothing.changed, nothing.silent) == (0.0, 0.0)
    assert nothing.refused == pytest.approx(1 - checked.kept.kept)


def test_seeds_reproduce_it_to_the_bit_and_all_is_left_as_found(guard, held_out, checked, model, left_as_found, data):
    before = held_out[0].clone()
    with left_as_found(model):
        again, other = (igeood.check(guard, held_out, limit=100, seed=seed) for seed in (0, 1))
    assert torch.equal(before, held_out[0])
    assert json.dumps(again.to_dict()) == json.dumps(igeood.check(guard, held_out, limit=100).to_dict())
    assert again.to_dict() != other.to_dict()
    assert again.faults[0].n == 100


def test_the_order_of_the_samples_does_not_matter(guard, held_out, checked):
    """Not even for faults that join two samples: folders of images are sorted by class."""
    order = held_out[1].argsort(stable=True)
    parts = zip(held_out[0][order].split(70), held_out[1][order].split(70), strict=True)
    for one, other in zip(igeood.check(guard, list(parts)).faults, checked.faults, strict=True):
        shares = [(each.refused, each.changed, each.silent) for each in (one, other)]
        assert shares[0] == pytest.approx(shares[1], abs=0.01)  # batches of another size round otherwise


def test_it_costs_one_pass_for_each_fault_and_few_more(guard, held_out, model):
    rows = 0

    def count(_, inputs):
        nonlocal rows
        rows += len(inputs[0])

    handle = model[0].register_forward_pre_hook(count)
    igeood.check(guard, held_out)
    handle.remove()
    assert rows <= 20 * 300 + 4 * len(catalogue.IMAGES)


def test_a_fault_of_ones_own_that_fails_says_so_and_the_others_are_done(guard, held_out):
    def fails(_):
        raise ValueError("fog\nmachine")

    own = {
        "fails": fails,
        "other shape": lambda x: x[:, :, :3],
        "fewer": lambda x: x[:-1],
        "NaN": lambda x: x * torch.nan,
        "in place": lambda x: x.zero_(),
        "random": lambda x: x + torch.randn_like(x),
        "no tensor": lambda _: "fog",
    }
    before = held_out[0].clone()
    found = {one.name: one for one in igeood.check(guard, held_out, faults=own).faults}
    assert {name for name, one in found.items() if one.problem} == {*own} - {"in place", "other shape", "random"}
    again = igeood.check(guard, held_out, faults={"random": own["random"]}).faults[0]
    assert (again.refused, again.silent) == (found["random"].refused, found["random"].silent)
    assert not any("\n" in one.problem for one in found.values())
    assert found["in place"].changed > 0.5
    assert torch.equal(before, held_out[0])


@pytest.mark.parametrize("kind", ["images", "tokens", "vectors"])
def test_faults_keep_the_number_of_samples_and_their_inputs(kind, data):
    x = {"images": data.images(7, 0)[0], "tokens": texts(7, 0), "vectors": torch.randn(7, 5)}[kind]
    batch = as_batch(x)
    assert catalogue.kind_of(batch) == kind
    usual = None if kind == "tokens" else catalogue.Usual.of([batch])
    for name, fault in catalogue.faults_for(batch, usual).items():
        before = batch.x.clone()
        results = [fault(batch, torch.Generator().manual_seed(3)) for _ in range(2)]
        assert torch.equal(before, batch.x), name
        assert len(results[0]) == 7, name
        assert all(torch.equal(results[0].inputs[key], results[1].inputs[key]) for key in batch.inputs), name
        assert name == "two texts joined" or results[0].x.shape == batch.x.shape, name


def test_faults_of_texts_are_what_their_names_say():
    batch = as_batch(texts(20, 0))
    draw = torch.Generator().manual_seed(0)
    results = {name: fault(batch, draw) for name, fault in catalogue.TOKENS.items()}

    def words(one, row):
        return catalogue.tokens_there(one, row).tolist()

    for row in range(20):
        first, *inner, last = words(batch, row)
        assert (first, last) == (40, 41)
        assert Counter(words(results["words shuffled"], row)) == Counter([40, *inner, 41])
        assert words(results["one word repeated"], row) == [40, *[inner[0]] * len(inner), 41]
        assert words(results["first words only"], row) == [40, *inner[:3], 41]
        assert words(results["two texts joined"], row) == [40, *inner, 41, *words(batch, (row + 1) % 20)]
        assert words(results["everything masked"], row) == [40, 41]
        assert words(results["random words"], row)[-1] == 41
    assert not torch.equal(results["words shuffled"].x, batch.x)


# -- other inputs


def test_texts_of_other_lengths_in_each_batch(reader):
    batches = [texts(50, 3, length) for length in (8, 9, 12)]
    result = igeood.check(reader, batches, {"others": [texts(40, 4)]}, decode=lambda ids: f"<{len(ids)} tokens>")
    assert [one.name for one in result.faults] == list(catalogue.TOKENS)
    assert {one.n for one in result.faults if not one.problem} == {150}
    assert "tokens&gt;" in page(result)


def test_images_of_other_sizes_vectors_and_inputs_of_no_kind(data):
    net = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 4)).eval()
    draw = torch.Generator().manual_seed(0)
    sizes = [torch.rand(60, 3, side, side, generator=draw) for side in (8, 9, 8)]
    guard = igeood.black_box(net, method="energy").fit([(x, torch.arange(60) % 4) for x in sizes])
    result = igeood.check(
        guard.calibrate(torch.rand(60, 3, 7, 7, generator=draw)), [s + 0.001 for s in sizes], limit=99
    )
    assert {one.n for one in result.faults} == {99}
    table = igeood.black_box(nn.Linear(5, 3).eval(), method="energy")
    table.fit([(torch.randn(90, 5), torch.arange(90) % 3)]).calibrate(torch.randn(90, 5))
    assert [one.name for one in igeood.check(table, torch.randn(90, 5)).faults] == list(catalogue.VECTORS)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(6, 3)).eval()
    odd = igeood.black_box(flat, method="energy").fit([(torch.randn(90, 2, 3), torch.arange(90) % 3)])
    result = igeood.check(odd.calibrate(torch.randn(90, 2, 3)), torch.randn(9, 2, 3))
    assert "(2, 3)" in result.no_faults


def test_equal_inputs_keep_to_the_limit_and_known_inputs_are_rarely_called_fewer(guard, held_out, make):
    same = held_out[0][:1].repeat(60, 1, 1, 1)
    result = igeood.check(guard, same, {"same": same}, limit=10)
    assert ({one.n for one in result.faults}, len(result.ood[0].most)) == ({10}, 3)
    c = make(4, 8000, margin=6.0)
    marked = 0
    for seed in range(30):  # a calibration of few samples has its own chance
        rows = torch.randperm(8000, generator=torch.Generator().manual_seed(seed))[:60]
        guard = igeood.black_box(method="energy").fit(c.train, c.labels).calibrate(c.held_out[rows])
        marked += igeood.check(guard, c.test).kept.below
    assert marked <= 5


def test_one_sample_no_labels_and_a_row_that_cannot_be_read(guard, held_out):
    result = igeood.check(guard, held_out[0][:1])
    assert (result.kept.n, result.by_true, result.accuracy) == (1, [], None)
    assert page(result)
    broken = held_out[0][:5].clone()
    broken[2] = torch.nan
    result = igeood.check(guard, broken, faults=None)
    assert (result.kept.n, result.unread) == (4, 1)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"limit": 0}, "limit"),
        ({"seed": 1.5}, "seed"),
        ({"held_out": (torch.rand(5, 3, 8, 8), torch.rand(5))}, "held_out"),
        ({"faults": "fog"}, "faults"),
        ({"held_out": "seen"}, "held_out"),
        ({"held_out": (torch.rand(5, 3, 8, 8), torch.tensor([0, 1, 2, 3, 9]))}, "held_out"),
        ({"ood": {"none": torch.full((3, 3, 8, 8), torch.nan)}}, "ood"),
    ],
)
def test_bad_input(guard, held_out, data, change, argument, refused):
    arguments = {"held_out": held_out, "faults": None, **change}
    if change.get("held_out") == "seen":
        arguments["held_out"] = data.held_out
    with refused(argument):
        igeood.check(guard, **arguments)


# -- what it says


def test_tables_have_every_figure(checked):
    rows = checked.rows()
    kinds = Counter(row["what"] for row in rows)
    assert (kinds["held out"], kinds["fault"], kinds["ood"], kinds["class"]) == (1, 17, 1, 4)
    assert len(checked.to_pandas()) == len(rows)
    assert all(one.name in repr(checked) for one in (*checked.faults, *checked.ood))
    assert 1 <= len(checked.advice) <= 3


def test_the_report_is_one_file_that_asks_nothing_of_others(checked, tmp_path, refused):
    checked.report(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "http" not in text.replace("http-equiv", "")
    assert text.count("<img") >= 2 * len(catalogue.IMAGES)
    assert all(one.name in text for one in checked.faults)
    for path in (tmp_path, tmp_path / "none" / "report.html"):
        with refused("path"):
            checked.report(path)


def test_names_in_the_report_are_text_and_its_monitor_shows_where_the_inputs_changed(classifier, tmp_path):
    evil = '"><script onload="1">'
    c = classifier
    guard = igeood.black_box().fit(c.train, c.labels).calibrate(c.held_out)
    known, strange = (np.resize(guard.score(x), n) for x, n in ((c.held_out, 600), (0 * c.test, 100)))
    scores = enumerate([*np.random.default_rng(0).permutation(known).tolist(), *strange.tolist()])
    (tmp_path / "v.csv").write_text("\n".join(["id,score", *(f"<script>{row},{score!r}" for row, score in scores)]))
    checked = igeood.check(guard, c.test, {evil: 0 * c.test})
    checked.report(tmp_path / "report.html", verdicts=[str(tmp_path / "v.csv")])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert evil in html.unescape(text)
    since, at = (int(n) for n in re.findall(r"input (\d+) \(&lt;script&gt;\1\)", text)[:2])
    assert 550 < since < at < 700  # they change after 600


@pytest.fixture
def folder(tmp_path, guard, model, data, held_out, monkeypatch):
    """A guard with a model's module, images in folders of classes, arrays of inputs."""
    monkeypatch.chdir(tmp_path)
    guard.classes = tuple("abcd")
    guard.preparation = {"size": 8, "mean": [0.0], "std": [1.0]}
    guard.save("guard.safetensors")
    guard.classes = guard.preparation = None
    torch.save(model.state_dict(), "weights.pt")
    (tmp_path / "nets_of_check.py").write_text(
        "from torch import nn\ndef make():\n    c = nn.Conv2d, nn.BatchNorm2d\n"
        "    return nn.Sequential(c[0](3, 8, 3, padding=1), c[1](8), nn.ReLU(), c[0](8, 16, 3, 2, padding=1), c[1](16),"
        " nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4))\n"
    )
    x, y = held_out
    np.savez("held.npz", x=x.numpy(), labels=y.numpy())
    for row in range(20):
        place = tmp_path / "known" / "abcd"[y[row]]
        place.mkdir(parents=True, exist_ok=True)
        pixels = (255 * x[row]).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(place / f"{row}.png")
    return SimpleNamespace(words=["guard.safetensors", "--model", "nets_of_check:make", "--weights", "weights.pt"])


def check_command(*words):
    return CliRunner().invoke(main, ["check", *words], prog_name="igeood")


def test_the_command_on_texts_and_on_logits(reader, classifier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reader.save("words.safetensors")
    torch.save(reader.source.model.state_dict(), "words.pt")
    (tmp_path / "words_of_check.py").write_text(
        "import torch\nfrom tests.test_checking import Bag\n"
        "def tokenize(texts):\n    rows = [[40, *map(int, text.split()), 41] for text in texts]\n"
        "    size = max(map(len, rows))\n    fill = lambda row, value: row + [value] * (size - len(row))\n"
        "    return {'input_ids': torch.tensor([fill(row, 0) for row in rows]),"
        " 'attention_mask': torch.tensor([fill([1] * len(row), 0) for row in rows])}\n"
        "tokenize.decode = lambda ids: f'words {ids.tolist()[1:-1]}'\n"
    )
    rows = [f"{a} {b} {a}" for a in range(10) for b in range(10)]
    (tmp_path / "texts.csv").write_text("\n".join(["text", *rows]))
    words = ["words.safetensors", "--model", "words_of_check:Bag", "--weights", "words.pt"]
    read = ["--text-column", "text", "--tokenizer", "words_of_check:tokenize"]
    result = check_command(*words, *read, "--data", "texts.csv", "--batch", "30", "--out", "texts.html")
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in catalogue.TOKENS)
    assert "words [" in Path("texts.html").read_text(encoding="utf-8")
    assert check_command(*words, *read[:2], "--data", "texts.csv").exit_code == 2
    c = classifier
    igeood.black_box().fit(c.train, c.labels).calibrate(c.held_out).save("logits.safetensors")
    igeood.write_logits("held.npz", c.test, c.labels)
    told = json.loads(check_command("logits.safetensors", "--data", "held.npz", "--json").stdout)
    assert told["accuracy"] == pytest.approx(float((c.test.argmax(1) == c.labels).float().mean()))
    assert told["no_faults"]


def test_the_command_on_images_and_arrays(folder, held_out, data):
    def run(*words):
        return check_command(*folder.words, *words)

    result = run("--data", "known", "--ood", "same=held.npz", "--out", "r.html", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [row["n"] for row in told["rows"] if row["what"] == "held out"] == [20]
    assert {row["name"] for row in told["rows"] if row["what"] == "class"} <= {*"abcd"}
    assert told["accuracy"] > 0.5
    assert "same" in Path("r.html").read_text(encoding="utf-8")
    again = run("--data", "held.npz", "--limit", "50", "--no-faults")
    assert again.exit_code == 0, again.output
    assert "300" in again.stdout
    for words in (("--data", "none"), ("--data", "held.npz", "--out", "r.html"), ("--data", "held.npz", "--ood", "x")):
        failed = run(*words)
        assert (failed.exit_code, failed.stderr.count("\n")) == (2, 1), failed.output
