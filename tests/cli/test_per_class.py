"""A threshold for each predicted class says the same in Python, in files, in a graph and to a monitor."""

import json

import numpy as np
import onnxruntime
import pyarrow.parquet as pq
import pytest

import igeood

NAMES = ("is_ood", "score", "p_value", "label")


@pytest.fixture
def guard(files, good, known):
    """The guard of the command line, and what it said of its calibration."""
    told = json.loads(good("calibrate", "fitted.safetensors", "held_out.npz", "--per-class", "--tpr", "0.9", "--json"))
    return igeood.load("fitted.safetensors"), told


def test_the_same_verdicts_everywhere(files, good, known, guard):
    loaded, told = guard
    made = igeood.load("guard.safetensors").calibrate(known.held_out.logits, 0.9, per_class=True)
    assert loaded.promise == told["promise"] == made.promise
    assert told["classes"] == [share._asdict() for share in loaded.calibration.by_class()]
    assert len(loaded.calibration.own) > 5
    logits = np.concatenate([known.test.logits, known.ood.logits])
    expected = made.predict(logits)
    common = made.score(logits) > made.threshold
    assert int((expected.is_ood != common).sum()) > 0
    igeood.write_logits("both.parquet", logits)
    good("score", "fitted.safetensors", "both.parquet", "--out", "o.parquet")
    good("export", "fitted.safetensors", "--out", "g.onnx")
    session = onnxruntime.InferenceSession("g.onnx")
    graph = dict(zip([one.name for one in session.get_outputs()], session.run(None, {"logits": logits}), strict=True))
    rows = pq.read_table("o.parquet")
    for name in NAMES:
        np.testing.assert_allclose(rows[name].to_numpy(), getattr(expected, name), rtol=1e-9)
        np.testing.assert_allclose(graph[name], getattr(expected, name), rtol=1e-9)
    assert np.array_equal(made.explain(logits).threshold < expected.score, expected.is_ood)


def test_a_monitor_reads_the_class_of_each_row(files, good, bad, known, guard):
    loaded, _ = guard
    good("score", "fitted.safetensors", "test.npz", "--out", "v.parquet")
    told = json.loads(good("monitor", "fitted.safetensors", "v.parquet", "--json"))
    monitor = igeood.Monitor(loaded)
    monitor.update(loaded.predict(known.test.logits))
    assert told["evidence"] == pytest.approx(monitor.evidence)
    rows = pq.read_table("v.parquet")
    pq.write_table(rows.drop_columns("label"), "without.parquet")
    pq.write_table(rows.set_column(rows.schema.get_field_index("label"), "label", [[77] * 400]), "other.parquet")
    pq.write_table(rows.set_column(rows.schema.get_field_index("label"), "label", [[-5] * 400]), "negative.parquet")
    for name in ("without", "other", "negative"):
        assert "label" in bad("monitor", "fitted.safetensors", f"{name}.parquet")
