"""Guards as ONNX graphs: they say in onnxruntime what the guard says, and a file is there only if they do."""

import copy
import json
import threading

import numpy as np
import pytest
import torch
from torch import nn

import igeood
from igeood.errors import InputError, MissingExtraError, NotReadyError
from igeood.geometry.plain import plain
from igeood.guard import export
from igeood.guard import graph as graphs
from igeood.outputs import Outputs

onnx = pytest.importorskip("onnx", reason="onnx is not installed: the extra `onnx` has it")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

WITH_MODEL = ["logits", "score", "p_value", "is_ood", "label"]


class Graph:
    """A file in onnxruntime."""

    def __init__(self, path):
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.inputs = {value.name: value.shape for value in self.session.get_inputs()}
        self.outputs = [value.name for value in self.session.get_outputs()]

    def __call__(self, **given):
        arrays = {name: np.asarray(value) for name, value in given.items()}
        return dict(zip(self.outputs, self.session.run(None, arrays), strict=True))


def agree(graph, verdict, tolerance):
    score = torch.as_tensor(verdict.score).numpy()
    np.testing.assert_allclose(graph["score"], score, rtol=tolerance, atol=tolerance)
    for name in ("is_ood", "label"):
        np.testing.assert_array_equal(graph[name], torch.as_tensor(getattr(verdict, name)).numpy())
    ranks = 0 if tolerance < 1e-8 else 3 / 400  # of a float32 network
    np.testing.assert_allclose(graph["p_value"], torch.as_tensor(verdict.p_value).numpy(), atol=ranks, rtol=1e-12)


@pytest.fixture(scope="module")
def white(model, data):
    return igeood.white_box(model).fit(data.train).calibrate(data.held_out)


@pytest.fixture(scope="module")
def path(white, model, data, left_as_found, tmp_path_factory):
    """The white box's file; the model, in training mode, is left as found."""
    path = tmp_path_factory.mktemp("export") / "guard.onnx"
    model.train()
    try:
        with left_as_found(model):
            white.export(path, example=data.test[:1])
    finally:
        model.eval()
    return path


@pytest.fixture(scope="module")
def graph(path):
    return Graph(path)


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_model_with_its_guard(graph, white, data, rows):
    x = torch.stack([data.test[:150], data.foreign[:150]], dim=1).flatten(0, 1)[:rows]
    assert graph.outputs == WITH_MODEL
    assert graph.inputs == {"input": ["samples", 3, 8, 8]}
    result = graph(input=x)
    agree(result, white.predict(x), 1e-5)
    np.testing.assert_allclose(result["logits"], white.inputs.model(x).detach(), atol=1e-5)


def test_what_cannot_be_read_is_refused_and_spoils_no_other(graph, white, data):
    x = data.test[:4].clone()
    x[1, 0, 0, 0], x[2, 1, 2, 3] = torch.nan, torch.inf
    result, expected = graph(input=x), white.predict(x, on_error="refuse")
    agree(result, expected, 1e-5)
    assert result["label"].tolist()[1:3] == [-1, -1]
    assert result["p_value"][1] == pytest.approx(1 / 401)
    assert np.isinf(result["score"][1:3]).all()


def test_the_file_says_what_it_is_and_nothing_of_where_it_was_made(path, white):
    model = onnx.load(path)
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert (model.producer_name, about["method"], about["promise"]) == ("igeood", "fisher-rao-product", white.promise)
    assert json.loads(about["layers"]) == white.layers
    assert about["fingerprint"] == white.inputs.fingerprint
    assert float(about["threshold"]) == white.threshold
    assert {"igeood", "torch", "onnx", "opset"} == set(json.loads(about["versions"]))
    assert b"/igeood/" not in path.read_bytes()
    assert [one.version for one in model.opset_import if one.domain == ""] == [20]


@pytest.mark.parametrize("probabilities", [False, True])
def test_logits_alone_need_no_example(classifier, probabilities, tmp_path):
    def given(logits):
        return torch.softmax(logits, dim=1).numpy() if probabilities else logits.numpy()

    guard = igeood.black_box(probabilities=probabilities).fit(given(classifier.train), classifier.labels)
    guard.calibrate(given(classifier.held_out)).export(tmp_path / "g.onnx")
    graph, rows = Graph(tmp_path / "g.onnx"), given(torch.cat([classifier.test[:60], classifier.ood[:60]]))
    assert (graph.outputs, graph.inputs) == (WITH_MODEL[1:], {"logits": ["samples", 10]})
    for size in (1, 7, 120):
        agree(graph(logits=rows[:size]), guard.predict(rows[:size]), 1e-10)
    bad = rows[:3].copy()
    bad[0, 0], bad[1] = np.nan, 0.3 if probabilities else -np.inf
    agree(graph(logits=bad), guard.predict(bad, on_error="refuse"), 1e-10)
    assert graph(logits=bad)["label"].tolist()[:2] == [-1, -1]


def test_extreme_logits(classifier, tmp_path):
    """Huge and masked ones, and rows that are on their centroid: where an arc cosine has no digits left."""
    guard = igeood.black_box().fit(classifier.train, classifier.labels).calibrate(classifier.held_out)
    guard.export(tmp_path / "g.onnx")
    rows = torch.cat([classifier.test[:5] * scale for scale in (1.0, 1e3, 1e30, 0.0)])
    rows = torch.cat([rows, guard.detector.centroids_.float(), rows[:5].index_fill(1, torch.tensor([3]), -torch.inf)])
    agree(Graph(tmp_path / "g.onnx")(logits=rows), guard.predict(rows), 1e-9)


@pytest.mark.parametrize("classes", [10, 140])
def test_centroids_that_nearly_coincide(classes, tmp_path):
    """A collapsed classifier: an arc cosine has no digits left for any of its distances."""
    draw, labels = torch.Generator().manual_seed(0), torch.arange(5 * classes) % classes
    rows = 1e-6 * torch.randn(5 * classes, classes, generator=draw).double()
    guard = igeood.black_box().fit(rows, labels).calibrate(1e-6 * torch.randn(200, classes, generator=draw).double())
    if classes == 140:  # so many are not compared one by one
        return refused(guard, tmp_path / "g.onnx", "the graph's score is", example=rows[:5])
    guard.export(tmp_path / "g.onnx", example=rows[:3])
    agree(Graph(tmp_path / "g.onnx")(logits=rows), guard.predict(rows), 1e-9)
    return None


def test_features_and_tuned_weights_without_a_model(known, tmp_path):
    guard = igeood.white_box(method="igeood+").fit(known.train)
    guard.tune(known.held_out, ood=known.ood[:200].replace(labels=None)).calibrate(known.held_out)
    guard.export(tmp_path / "g.onnx", example=known.test[:5])
    graph, rows = Graph(tmp_path / "g.onnx"), known.ood[200:]
    widths = {"logits": 10, "feature.early": 6, "feature.block.late": 9}
    assert graph.inputs == {name: ["samples", width] for name, width in widths.items()}
    features = {f"feature.{block}": value for block, value in rows.features.items()}
    refused(
        guard, tmp_path / "h.onnx", "example: the guard cannot judge it .*no features of layer", example=rows.logits
    )
    agree(graph(logits=rows.logits, **features), guard.predict(rows), 1e-9)


@pytest.mark.parametrize("method", ["fisher-rao-product", "igeood-logits"])
def test_many_classes(method, tmp_path):
    """So many classes and channels that distances to all of them are not computed one by one."""
    draw, n, k = torch.Generator().manual_seed(0), 300, 60
    means, labels = torch.randn(n, k, generator=draw), torch.arange(4 * n) % n

    def outputs(rows, noise):
        z = means[rows] + noise * torch.randn(len(rows), k, generator=draw)
        return Outputs(2.0 * z @ means.T, {"z": z}, rows)

    train, held_out = outputs(labels, 0.5), outputs(labels[:400], 0.5)
    test = Outputs.concat([outputs(labels[:80], 0.5), outputs(labels[:80], 5.0)]).replace(labels=None)
    white = igeood.METHODS[method].needs_layers
    make = igeood.white_box if white else igeood.black_box
    guard = make(method=method).fit(train).calibrate(held_out)
    guard.export(tmp_path / "g.onnx", example=test[:4])
    given = {"logits": test.logits, **({"feature.z": test.features["z"]} if white else {})}
    agree(Graph(tmp_path / "g.onnx")(**given), guard.predict(test), 1e-9)


class Patches(nn.Module):
    """A small vision transformer."""

    def __init__(self):
        super().__init__()
        self.patch, self.first = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 1, 16))
        layers = [nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True) for _ in range(3)]
        self.blocks, self.norm, self.head = nn.ModuleList(layers), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        z = self.patch(x).flatten(2).transpose(1, 2)
        z = torch.cat([self.first.expand(z.shape[0], -1, -1), z], dim=1)
        for block in self.blocks:
            z = block(z)
        return self.head(self.norm(z)[:, 0])


def test_a_vision_transformer(data, tmp_path):
    torch.manual_seed(0)
    guard = igeood.white_box(Patches().eval()).fit(data.train).calibrate(data.held_out)
    guard.export(tmp_path / "g.onnx", example=data.test[:2])
    graph = Graph(tmp_path / "g.onnx")
    for rows in (1, 60):
        agree(graph(input=data.test[:rows]), guard.predict(data.test[:rows]), 1e-4)


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

    guard = igeood.white_box(model).fit([texts(64, 9, i) for i in range(4)]).calibrate([texts(64, 9, 9)])
    guard.export(tmp_path / "g.onnx", example=texts(3, 9, 5))
    graph = Graph(tmp_path / "g.onnx")
    assert graph.inputs == {name: ["samples", "tokens"] for name in ("input_ids", "attention_mask")}
    for n, tokens in ((1, 9), (40, 6), (7, 12)):
        batch = texts(n, tokens, 6)
        del batch["labels"]
        agree(graph(**batch), guard.predict(batch), 1e-4)


class Columns(nn.Module):
    """Takes five columns of categories, no more and no fewer."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 4), nn.Linear(20, 3)

    def forward(self, x):
        return self.head(torch.cat([self.embed(x[:, i]) for i in range(5)], dim=1))


def test_integers_that_are_no_tokens_and_ids_below_0(tmp_path):
    torch.manual_seed(0)
    x = torch.randint(20, (300, 5), generator=torch.Generator().manual_seed(0))
    guard = igeood.black_box(Columns().eval()).fit((x[:200], torch.arange(200) % 3)).calibrate(x[200:])
    guard.export(tmp_path / "g.onnx", example=x[:4])
    graph = Graph(tmp_path / "g.onnx")
    assert graph.inputs == {"input": ["samples", 5]}
    given = x[:6].clone()
    given[2, 1] = -1
    agree(graph(input=given), guard.predict(given, on_error="refuse"), 1e-5)
    assert graph(input=given)["label"][2] == -1


def refused(guard, path, match, **options):
    """Exporting is an error, and leaves no file."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(InputError, match=match):
        guard.export(path, **options)
    assert sorted(path.parent.iterdir()) == before


def test_what_cannot_be_exported_says_why(model, data, classifier, white, tmp_path):
    path, x = tmp_path / "g.onnx", data.test[:3]
    grey = igeood.grey_box(model).fit(data.train).calibrate(data.held_out)
    refused(grey, path, "epsilon: the input step needs a gradient.*export a black box, or a white box", example=x)
    theirs = igeood.wrap(lambda logits: logits.max(dim=1).values, higher_is="id")
    wrapped = igeood.black_box(method=theirs).fit(classifier.train).calibrate(classifier.held_out)
    refused(wrapped, path, "is not ours, and cannot be exported; use one of igeood.METHODS")
    refused(white, path, "example: the model's inputs are not known; give some")
    refused(white, tmp_path, "path: .* is a folder", example=x)
    stuck = copy.deepcopy(model)
    stuck.lock = threading.Lock()
    locked = igeood.black_box(stuck).fit(data.train).calibrate(data.held_out)
    refused(locked, path, r"model: cannot be copied \(TypeError: .*; remove what cannot", example=x)
    refused(white, path, "example: has no sample", example=x[:0])
    refused(white, path, r"example: the guard cannot judge it \(input \(3, 1, 8, 8\)\): RuntimeError: Given groups=1",
            example=x[:, :1])  # fmt: skip
    half = igeood.black_box(copy.deepcopy(model).bfloat16()).fit(data.train).calibrate(data.held_out)
    refused(half, path, r"model: its weights are bfloat16.*; fit the guard with model.float\(\)", example=x)
    fitted = igeood.black_box().fit(classifier.train, classifier.labels)
    with pytest.raises(NotReadyError, match="export: no threshold yet; call calibrate"):
        fitted.export(path)
    with pytest.raises(NotReadyError, match="export: the guard is not fitted yet"):
        igeood.black_box().export(path)


class Keywords(nn.Module):
    """Takes a mask of floats, of which −inf hides an input, and constants."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, mask=None, weight=None, score=None):
        hidden = x if mask is None else x * mask.exp()[:, None, None, None]
        return self.model(hidden) * (1.0 if weight is None else weight.sum()) + (0.0 if score is None else score)


def test_only_the_input_with_the_samples_must_be_finite_and_constants_stay_constants(model, data, tmp_path):
    def batch(x, y=None):
        mask = torch.where(torch.arange(len(x)) % 2 == 1, -torch.inf, 0.0)
        return {"x": x, "mask": mask, "weight": torch.tensor([0.5, 0.25, 0.25]), **({} if y is None else {"labels": y})}

    model = Keywords(model)
    guard = igeood.black_box(model).fit([batch(*b) for b in data.train]).calibrate([batch(x) for x, _ in data.held_out])
    guard.export(tmp_path / "g.onnx", example=batch(data.test[:5]))
    graph, given = Graph(tmp_path / "g.onnx"), batch(data.test[:40])
    assert graph.inputs == {"x": ["samples", 3, 8, 8], "mask": ["samples"]}
    agree(graph(x=given["x"], mask=given["mask"]), guard.predict(given), 1e-5)
    taken = {"x": data.test[:5], "score": torch.zeros(5, 1)}
    refused(guard, tmp_path / "h.onnx", "model: it takes 'score', which is an output's name here", example=taken)


def test_others_may_use_the_model_meanwhile(white, data, tmp_path):
    stop, troubles = threading.Event(), []

    def judge():
        expected = white.score(data.test[:8])
        while not stop.is_set():
            try:
                if not torch.allclose(white.score(data.test[:8]), expected, atol=1e-6):
                    troubles.append("other scores")
            except Exception as error:  # noqa: BLE001, PERF203
                troubles.append(repr(error))

    thread = threading.Thread(target=judge)
    thread.start()
    try:
        white.export(tmp_path / "g.onnx", example=data.test[:3])
    finally:
        stop.set()
        thread.join()
    assert troubles == []


class Fixed(nn.Module):
    """Works on batches of any size, but by a path that depends on values."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x) if bool((x > -1e9).all()) else self.model(-x)


def test_a_model_that_decides_by_values_is_refused(model, data, tmp_path):
    guard = igeood.black_box(Fixed(model)).fit(data.train).calibrate(data.held_out)
    refused(guard, tmp_path / "g.onnx", "model: cannot be traced .*it must not decide by values", example=data.test[:3])


def test_no_file_where_the_graph_disagrees(white, data, tmp_path, monkeypatch):
    forward = graphs.Graph.forward
    wrong = lambda self, *given: [part + 0.01 * (i == 1) for i, part in enumerate(forward(self, *given))]  # noqa: E731
    monkeypatch.setattr(graphs.Graph, "forward", wrong)
    wanted = "the graph's score is .* of sample 0, where the guard has"
    refused(white, tmp_path / "g.onnx", wanted, example=data.test[:3])


def test_other_verdicts_p_values_and_labels_are_no_agreement(white, data, graph):
    x = torch.cat([data.test[:4], data.foreign[:4]])
    x[0] = torch.nan
    batch, said = next(iter(white.inputs.batches(x, refused={}))), graph(input=x)
    export._agree(said, white, batch)
    wrong = {
        "is_ood": ~said["is_ood"], "label": np.full(8, 2), "score": np.full(8, np.nan), "p_value": said["p_value"] / 2,
    }  # fmt: skip
    for name, values in wrong.items():
        with pytest.raises(InputError, match="example: the graph's"):
            export._agree(said | {name: values}, white, batch)
        only_first = np.where(np.arange(8) == 0, values, said[name]).astype(said[name].dtype)
        if name != "p_value":  # the smallest there is
            with pytest.raises(InputError, match="example: the graph's"):
                export._agree(said | {name: only_first}, white, batch)


def test_only_graphs_of_guards_are_replaced(classifier, path, tmp_path):
    guard = igeood.black_box(method="msp").fit(classifier.train).calibrate(classifier.held_out)
    target = tmp_path / "g.onnx"
    target.write_bytes(b"somebody's only copy")
    refused(guard, target, "is there, and is no guard's graph; name another file")
    assert target.read_bytes() == b"somebody's only copy"
    target.write_bytes(path.read_bytes())
    guard.export(target)
    assert Graph(target).outputs == WITH_MODEL[1:]


def test_a_graph_that_is_too_large_and_a_missing_extra(classifier, tmp_path, monkeypatch):
    guard = igeood.black_box().fit(classifier.train, classifier.labels).calibrate(classifier.held_out)
    with monkeypatch.context() as patch:
        patch.setattr(export, "LARGEST_FILE", 100)
        refused(guard, tmp_path / "g.onnx", "its graph has .* bytes, but an ONNX file 100 at most")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"onnxruntime is needed; pip install 'igeood\[onnx\]'"):
        guard.export(tmp_path / "g.onnx")


@pytest.mark.parametrize("name", ["asin", "acos", "asinh", "log1p"])
def test_functions_of_plain_mode_are_those_of_torch(name):
    size = torch.logspace(-300, 0, 2001, dtype=torch.float64)
    x = torch.cat([-size.flip(0), torch.zeros(1, dtype=torch.float64), size, 1 - size[size < 0.1]])
    x = {"log1p": x[x > -1], "asinh": torch.cat([x, x * 1e10, x * 1e100])}.get(name, x)
    expected = getattr(torch, name)(x)
    with plain():
        torch.testing.assert_close(getattr(torch, name)(x), expected, rtol=4e-15, atol=0)
        inplace = x.clone()
        assert getattr(inplace, f"{name}_")() is inplace
        torch.testing.assert_close(inplace, expected, rtol=4e-15, atol=0)


def test_angles_and_signs_of_plain_mode_are_those_of_torch():
    values = torch.tensor([-2.0, -1e-200, 0.0, 1e-9, 1.0, 3.0], dtype=torch.float64)
    y, x = torch.cartesian_prod(values, values).T
    for function in (torch.atan2, torch.copysign):
        expected = function(y, x)
        with plain():
            torch.testing.assert_close(function(y, x), expected, rtol=4e-15, atol=1e-15)


def test_numbers_of_plain_mode_stay_numbers_where_float32_can_hold_them():
    x = torch.ones(2, dtype=torch.float64)
    with plain():
        assert torch.equal(x * 0.1 + 2.5, torch.full_like(x, 0.1) + 2.5)
        assert torch.equal(x.clamp(min=1e-300, max=0.7), torch.full_like(x, 0.7))
        assert torch.equal(x.float() * 0.1, torch.full((2,), 0.1))
        assert float((x * 1e300)[0]) == 1e300
