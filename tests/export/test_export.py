"""Guards as ONNX graphs: they say in onnxruntime what the guard says, and a file is there only if they do."""

import copy
import json
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

import igeood
from igeood.errors import InputError, MissingExtraError, NotReadyError
from igeood.outputs import Outputs

onnx = pytest.importorskip("onnx", reason="onnx is not installed: the extra `onnx` has it")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from igeood.export import writing  # noqa: E402

WITH_MODEL = ["logits", "score", "p_value", "is_ood", "label"]
NETWORK = 1e-4  # what runtimes may round differently in float32
HEAD = 1e-9


class Graph:
    """A file in onnxruntime."""

    def __init__(self, path):
        self.path = path
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.inputs = {value.name: value.shape for value in self.session.get_inputs()}
        self.outputs = [value.name for value in self.session.get_outputs()]

    def __call__(self, **given):
        results = self.session.run(None, {name: np.asarray(value) for name, value in given.items()})
        return dict(zip(self.outputs, results, strict=True))


def agree(results, verdict, tolerance, threshold=None):
    score = torch.as_tensor(verdict.score).numpy()
    np.testing.assert_allclose(results["score"], score, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(results["label"], torch.as_tensor(verdict.label).numpy())
    far = np.full(len(score), True) if threshold is None else np.abs(score - threshold) > tolerance
    np.testing.assert_array_equal(results["is_ood"][far], torch.as_tensor(verdict.is_ood).numpy()[far])
    if tolerance == HEAD:
        np.testing.assert_array_equal(results["p_value"], torch.as_tensor(verdict.p_value).numpy())


def exported(guard, tmp_path, **options):
    guard.export(tmp_path / "g.onnx", **options)
    return Graph(tmp_path / "g.onnx")


def refused(guard, path, argument, **options):
    """Exporting is an error, and leaves no file."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(InputError) as caught:
        guard.export(path, **options)
    assert caught.value.argument == argument
    assert sorted(path.parent.iterdir()) == before


@pytest.fixture(scope="module")
def white(model, data):
    """A guard of a model in training mode."""
    net = nn.Sequential(*copy.deepcopy(model)).train()
    return igeood.white_box(net, method="igeood").fit(data.train).calibrate(data.held_out)


@pytest.fixture(scope="module")
def graph(white, data, left_as_found, tmp_path_factory):
    """The white box's file; the model is left as found."""
    with left_as_found(white.source.model):
        return exported(white, tmp_path_factory.mktemp("export"), example=data.test[:1])


def test_a_model_with_its_guard(graph, white, data):
    x = torch.stack([data.test[:150], data.foreign[:150]], dim=1).flatten(0, 1)
    assert (graph.outputs, graph.inputs) == (WITH_MODEL, {"input": ["samples", 3, 8, 8]})
    for rows in (1, 7, 300):
        agree(graph(input=x[:rows]), white.predict(x[:rows]), NETWORK, white.threshold)
    expected = copy.deepcopy(white.source.model).eval()(x).detach()
    np.testing.assert_allclose(graph(input=x)["logits"], expected, atol=NETWORK)


def test_a_bad_row_is_refused_and_spoils_no_other(graph, white, data):
    x = data.test[:4].clone()
    x[1, 0, 0, 0], x[2, 1, 2, 3] = torch.nan, torch.inf
    results = graph(input=x)
    agree(results, white.predict(x, on_error="refuse"), NETWORK, white.threshold)
    assert results["label"].tolist()[1:3] == [-1, -1]


def test_the_file_says_what_it_is_and_nothing_of_where_it_was_made(graph, white):
    model = onnx.load(graph.path)
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert (model.producer_name, about["method"], about["promise"]) == ("igeood", "igeood", white.promise)
    assert (json.loads(about["layers"]), about["fingerprint"]) == (white.layers, white.source.fingerprint)
    assert float(about["threshold"]) == white.threshold
    assert b"/igeood/" not in graph.path.read_bytes()
    assert [one.version for one in model.opset_import if one.domain == ""] == [20]


@pytest.mark.parametrize("probabilities", [False, True])
def test_logits_alone_need_no_example(classifier, probabilities, tmp_path):
    """Also huge and masked ones, and rows on their centroid, where an arc cosine has no digits left."""

    def given(logits):
        return torch.softmax(logits.double(), dim=1).float().numpy() if probabilities else logits.numpy()

    guard = igeood.black_box(method="igeood-logits", probabilities=probabilities)
    guard.fit(given(classifier.train), classifier.labels).calibrate(given(classifier.held_out))
    graph = exported(guard, tmp_path)
    assert (graph.outputs, graph.inputs) == (WITH_MODEL[1:], {"logits": ["samples", 10]})
    masked = classifier.test[:5].index_fill(1, torch.tensor([3]), -torch.inf)
    known = [classifier.test[:60] * scale for scale in (1.0, 1e3, 1e30, 0.0)]
    rows = given(torch.cat([*known, classifier.ood[:60], guard.detector.centroids_.float(), masked]))
    for size in (1, 7, len(rows)):
        agree(graph(logits=rows[:size]), guard.predict(rows[:size]), HEAD)
    bad = rows[:3].copy()
    bad[0, 0] = np.nan
    bad[1] = 0.3 if probabilities else -np.inf
    agree(graph(logits=bad), guard.predict(bad, on_error="refuse"), HEAD)
    assert graph(logits=bad)["label"].tolist()[:2] == [-1, -1]


@pytest.mark.parametrize("classes", [10, 140])
def test_centroids_that_nearly_coincide(classes, tmp_path):
    """A collapsed classifier: an arc cosine has no digits left. So many as 140 are not compared one by one."""
    rows = 1e-6 * torch.randn(1180, classes, generator=torch.Generator().manual_seed(0)).double()
    guard = igeood.black_box(method="igeood-logits").fit(rows[:980], torch.arange(980) % classes).calibrate(rows[980:])
    if classes == 140:
        refused(guard, tmp_path / "g.onnx", "example", example=rows[:5])
    else:
        agree(exported(guard, tmp_path, example=rows[:3])(logits=rows), guard.predict(rows), HEAD)


@pytest.mark.slow
def test_features_and_tuned_weights_without_a_model(known, tmp_path):
    guard = igeood.white_box(method="igeood+").fit(known.train)
    guard.tune(known.held_out, ood=known.ood[:200].replace(labels=None)).calibrate(known.held_out)
    graph = exported(guard, tmp_path, example=known.test[:5])
    rows = known.ood[200:]
    widths = {"logits": 10, "feature.early": 6, "feature.block.late": 9}
    assert graph.inputs == {name: ["samples", width] for name, width in widths.items()}
    features = {f"feature.{block}": value for block, value in rows.features.items()}
    agree(graph(logits=rows.logits, **features), guard.predict(rows), HEAD)
    refused(guard, tmp_path / "h.onnx", "example", example=rows.logits)


@pytest.mark.slow
def test_so_many_classes_that_distances_to_all_are_not_computed(tmp_path):
    draw = torch.Generator().manual_seed(0)
    means, labels = torch.randn(300, 60, generator=draw), torch.arange(1200) % 300

    def outputs(rows, noise):
        z = means[rows] + noise * torch.randn(len(rows), 60, generator=draw)
        return Outputs(2.0 * z @ means.T, {"z": z}, rows)

    guard = igeood.white_box(method="igeood").fit(outputs(labels, 0.5)).calibrate(outputs(labels[:400], 0.5))
    test = Outputs.concat([outputs(labels[:80], 0.5), outputs(labels[:80], 5.0)])
    graph = exported(guard, tmp_path, example=test[:4])
    agree(graph(**{"logits": test.logits, "feature.z": test.features["z"]}), guard.predict(test), HEAD)


def test_token_ids_of_any_number(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=50, num_labels=3, **sizes)
    model = transformers.BertForSequenceClassification(config).eval()

    def texts(n, tokens, seed):
        draw = torch.Generator().manual_seed(seed)
        shown = torch.arange(tokens) < torch.randint(3, tokens + 1, (n, 1), generator=draw)
        ids = torch.randint(1, 50, (n, tokens), generator=draw) * shown
        return {"input_ids": ids, "attention_mask": shown.long(), "labels": torch.arange(n) % 3}

    guard = igeood.white_box(model, method="knn").fit([texts(64, 9, i) for i in range(4)]).calibrate([texts(64, 9, 9)])
    graph = exported(guard, tmp_path, example=texts(3, 9, 5))
    assert graph.inputs == {name: ["samples", "tokens"] for name in ("input_ids", "attention_mask")}
    for n, tokens in ((1, 9), (40, 6), (7, 12)):
        batch = texts(n, tokens, 6)
        del batch["labels"]
        np.testing.assert_allclose(graph(**batch)["score"], guard.predict(batch).score, atol=1e-3)


def test_integers_that_are_no_tokens_and_ids_below_0(tmp_path):
    torch.manual_seed(0)
    columns = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(20, 3)).eval()  # five, no more and no fewer
    x = torch.randint(20, (300, 5), generator=torch.Generator().manual_seed(0))
    guard = igeood.black_box(columns, method="energy").fit(x[:200]).calibrate(x[200:])
    graph = exported(guard, tmp_path, example=x[:4])
    assert graph.inputs == {"input": ["samples", 5]}
    agree(graph(input=x[:5]), guard.predict(x[:5]), NETWORK, guard.threshold)
    below = graph(input=torch.full((1, 5), -1))
    assert (below["label"][0], below["is_ood"][0], below["score"][0]) == (-1, True, np.inf)


class Keywords(nn.Linear):
    """Takes a mask of floats, of which −inf hides an input, and a constant."""

    def forward(self, x, mask, weight, score=0.0):
        return super().forward(x.flatten(1) * mask.exp()[:, None] * weight.sum()) + score


def test_keywords_and_constants(data, tmp_path):
    def batch(x):
        mask = torch.where(torch.arange(len(x)) % 2 == 1, -torch.inf, 0.0)
        return {"x": x, "mask": mask, "weight": torch.tensor([0.5, 0.25, 0.25])}

    torch.manual_seed(0)
    guard = igeood.black_box(Keywords(192, 4), method="energy").fit([batch(x) for x, _ in data.train])
    guard.calibrate([batch(x) for x, _ in data.held_out])
    graph, rows = exported(guard, tmp_path, example=batch(data.test[:5])), batch(data.test[:40])
    assert graph.inputs == {"x": ["samples", 3, 8, 8], "mask": ["samples"]}
    np.testing.assert_allclose(graph(x=rows["x"], mask=rows["mask"])["score"], guard.score(rows), atol=NETWORK)
    refused(guard, tmp_path / "h.onnx", "model", example={**batch(data.test[:5]), "score": torch.zeros(5, 1)})


def test_what_cannot_be_exported(model, data, classifier, white, tmp_path, monkeypatch):
    path, x = tmp_path / "g.onnx", data.test[:3]
    grey = igeood.grey_box(model, epsilon=0.001, method="energy").fit(data.train).calibrate(data.held_out)
    refused(grey, path, "epsilon", example=x)
    theirs = igeood.wrap(lambda logits: logits.max(dim=1).values, higher_is="id")
    refused(igeood.black_box(method=theirs).fit(classifier.train).calibrate(classifier.held_out), path, "detector")
    for example in (None, x[:0], x[:, :1]):
        refused(white, path, "example", example=example)
    stuck, brief, double = (copy.deepcopy(model) for _ in range(3))
    stuck.lock = threading.Lock()
    for other in (stuck, brief.bfloat16(), double.double()):  # runtimes lack convolutions of float64
        guard = igeood.black_box(other, method="energy").fit(data.train).calibrate(data.held_out)
        refused(guard, path, "model", example=x)
    fitted = igeood.black_box(method="energy").fit(classifier.train)
    for guard in (fitted, igeood.black_box()):
        with pytest.raises(NotReadyError):
            guard.export(path)
    monkeypatch.setattr(writing, "LARGEST_FILE", 100)
    refused(white, path, "model", example=x)
    monkeypatch.setitem(sys.modules, "igeood.export.writing", None)
    with pytest.raises(MissingExtraError):
        fitted.calibrate(classifier.held_out).export(path)


def test_other_verdicts_p_values_and_labels_are_no_agreement(white, data, graph):
    x = torch.cat([data.test[:4], data.foreign[:4]])
    results = {"input": x} | {name: torch.as_tensor(value) for name, value in graph(input=x).items()}
    writing.check_agreement(results, white, x)
    wrong = {"is_ood": ~results["is_ood"], "label": results["label"] * 0 - 1, "score": results["score"] * torch.nan}
    for name, values in {**wrong, "p_value": results["p_value"] / 2}.items():
        with pytest.raises(InputError) as caught:
            writing.check_agreement({**results, name: values}, white, x)
        assert (caught.value.argument, name in caught.value.what) == ("example", True)


def test_only_graphs_of_guards_are_replaced_and_others_may_use_the_model(white, data, graph, tmp_path):
    target = tmp_path / "g.onnx"
    target.write_bytes(b"somebody's only copy")
    refused(white, target, "path", example=data.test[:3])
    assert target.read_bytes() == b"somebody's only copy"
    target.write_bytes(graph.path.read_bytes())
    exporting = threading.Thread(target=white.export, args=(target, data.test[:3]))
    expected = white.score(data.test[:8])
    exporting.start()
    while exporting.is_alive():
        torch.testing.assert_close(white.score(data.test[:8]), expected, atol=1e-3, rtol=1e-3)
        exporting.join(0.2)
    assert Graph(target).outputs == WITH_MODEL
