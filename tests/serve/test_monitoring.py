"""What the service remembers: the monitor's evidence, counts for Prometheus, the last hour."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import igeood
from igeood.calibration import Calibration
from igeood.monitor import Monitor
from igeood.outputs import as_tensor
from igeood.serve import metrics as module
from igeood.serve.metrics import Recent
from igeood.serve.service import Service

EXAMPLES = Path(__file__).parents[2] / "examples" / "service"


@pytest.fixture(scope="module")
def streams():
    """Rows like the calibration samples, and others."""
    draw = np.random.default_rng(0)
    known = draw.normal(size=(300, 10)) + 8 * np.eye(10)[draw.integers(0, 10, 300)] * draw.uniform(0.6, 1, (300, 1))
    return known, draw.normal(size=(200, 10)) * 1.5


def send(running, client, rows, cuts):
    """Send rows in requests of these sizes, one after the other."""
    start, before = 0, running.count("inputs")
    for size in cuts:
        assert client.post("/predict", rows[start : start + size].tolist())[0] == 200
        start += size
    running.counted(before + start)
    return rows[:start]


def monitor_of(client):
    return client.get("/status")[1]["monitor"]


def test_evidence_is_that_of_a_monitor_fed_in_order_and_goes_on_after_a_restart(
    guards, copied, serving, streams, caplog
):
    path, guard, (known, foreign) = copied(guards.logits), guards.logits.guard, streams
    own = Monitor(guard, run_length=100_000)
    with serving(path, run_length=100_000) as running:
        client = running.client()
        for rows, cuts in ((known, [1, 7, 100, 1, 64]), (foreign, [1, 2])):
            own.update(guard.predict(send(running, client, rows, cuts)))
        shown = monitor_of(client)
        assert (shown["inputs"], shown["evidence"], shown["alarm"]) == (176, pytest.approx(own.evidence), False)
    state = path.with_name("guard.safetensors.monitor.json")
    assert json.loads(state.read_text())["inputs"] == 176
    with serving(path, run_length=100_000) as running:
        client = running.client()
        assert monitor_of(client)["evidence"] == pytest.approx(own.evidence)
        own.update(guard.predict(send(running, client, foreign, [10] * 6)))
        shown = monitor_of(client)
        assert own.alarm
        with pytest.raises(igeood.errors.InputError):  # the state is taken
            Service(path)
        assert (shown["inputs"], shown["alarm"], shown["since"]) == (236, True, own.since)
        assert [(a["at"], a["since"]) for a in shown["alarms"]] == [(a.at, a.since) for a in own.alarms]
        assert sum(client.get("/status")[1]["hour"]["inputs"]) == 60
        assert client.post("/monitor/acknowledge", b"") == (200, {"acknowledged": len(own.alarms)})
        shown = monitor_of(client)
        assert (shown["alarm"], shown["alarms"], shown["alarm_count"]) == (False, [], own.alarm_count)
    assert json.loads(state.read_text())["alarms"] == []
    assert {"alarm", "acknowledged"} <= {record.getMessage() for record in caplog.records}


def test_a_reload_keeps_the_monitor_of_the_same_calibration_and_starts_one_for_another(
    guards, copied, serving, streams
):
    path, (known, foreign) = copied(guards.logits), streams
    other = igeood.load(path).calibrate(known[:200], tpr=0.9)
    with serving(path, run_length=100) as running:
        client, service = running.client(), running.service
        send(running, client, foreign, [20])
        before = monitor_of(client)
        assert before["alarm"]
        service._reload()
        assert monitor_of(client) == before
        assert sum(client.get("/status")[1]["hour"]["inputs"]) == 20
        other.save(path)
        service._reload()
        status = client.get("/status")[1]
        assert (status["monitor"]["inputs"], status["monitor"]["alarm"], status["guard"]["tpr"]) == (0, False, 0.9)
        assert (status["monitor"]["run_length"], sum(status["hour"]["inputs"])) == (100, 0)
        send(running, client, known[200:], [5, 5])
        assert running.count("inputs") == 30
    with serving(path, run_length=100) as running:
        assert running.service.served.monitor.inputs == 10


def test_metrics_are_those_of_the_dashboard_and_count_right(guards, copied, serving, streams):
    guard, rows = guards.logits.guard, np.concatenate([streams[0][:60], streams[1][:40]])
    with serving(copied(guards.logits)) as running:
        client = running.client()
        send(running, client, rows, [10] * 10)
        body = json.dumps({"logits": [[None] * 10, *rows[:3].tolist()], "on_error": "refuse"}).encode()
        assert client.post("/predict", body)[0] == 200
        running.counted(104)
        assert (client.post("/predict", [[None] * 10] * 3)[0], client.get("/nothing")[0]) == (400, 404)
        families = {one.name: one for one in text_string_to_metric_families(client.get("/metrics")[1].decode())}
        evidence = running.service.served.monitor.evidence
        hour = client.get("/status")[1]["hour"]
    samples = [sample for family in families.values() for sample in family.samples]
    values = {sample.name.removeprefix("igeood_"): sample.value for sample in samples if not sample.labels}
    verdict = guard.predict(np.concatenate([rows, rows[:3]]))  # the unread row is no evidence
    own = Monitor(guard)
    own.update(verdict)
    assert (values["inputs_total"], values["unread_total"], values["rejected_total"]) == (104, 1, 3)
    assert (values["ood_total"], values["queue_length"]) == (verdict.is_ood.sum(), 0)
    assert (values["threshold"], values["expected_ood_share"]) == (guard.threshold, pytest.approx(0.05))
    assert (values["monitor_evidence"], values["monitor_run_length"]) == (evidence, 1e6)
    assert evidence == pytest.approx(own.evidence)
    assert (sum(hour["inputs"]), sum(hour["ood"]), sum(hour["unread"])) == (104, verdict.is_ood.sum(), 1)
    requests = {(s.labels["path"], s.labels["status"]): s.value for s in families["igeood_requests"].samples}
    assert requests == {("predict", "200"): 11, ("predict", "400"): 1, ("other", "404"): 1}
    (info,) = families["igeood_info"].samples
    assert (info.labels["promise"], info.labels["access"]) == (guard.promise, "black box")
    for name, column in (("score", verdict.score), ("p_value", verdict.p_value), ("batch_inputs", [10] * 10 + [4])):
        buckets = [s for s in families[f"igeood_{name}"].samples if s.name.endswith("_bucket")]
        assert [s.value for s in buckets] == [(np.array(column) <= float(s.labels["le"])).sum() for s in buckets]
    texts = "".join((EXAMPLES / name).read_text(encoding="utf-8") for name in ("grafana.json", "alerts.yml"))
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"igeood_\w+", texts)}
    assert shown == {f"{name}_total" if one.type == "counter" else name for name, one in families.items()}


@pytest.mark.parametrize(
    "scores", [np.full(1000, 3.0), -1.5707963 + 1e-12 * np.arange(1000), 1e300 * np.arange(1, 1001)]
)
def test_bounds_of_scores_are_apart_however_close_or_large_the_scores(scores, monkeypatch):
    recent = Recent(Calibration(as_tensor(scores, "scores")[0]))
    assert len(set(recent.edges)) == module.BINS + 1
    recent.add((3, 0, 0), 1.0, [0.0] * 3)
    record = recent.record()
    assert sum(record["scores"]["calibration"]) == pytest.approx(1)
    assert (sum(record["scores"]["latest"]), sum(record["hour"]["inputs"])) == (3, 3)
    later = time.time() + 3700
    monkeypatch.setattr(module.time, "time", lambda: later)
    assert sum(recent.record()["hour"]["inputs"]) == 0  # an hour forgets what is older
