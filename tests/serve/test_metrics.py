"""What the service remembers: the monitor's evidence, counts for Prometheus, the last hour."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import igeood
from igeood.monitor import Monitor
from igeood.serve import metrics as module
from igeood.serve.metrics import Bins, Recent
from igeood.serve.service import Options, Service

EXAMPLES = Path(__file__).parents[2] / "examples" / "service"
PATIENCE = 30


@pytest.fixture(scope="module")
def streams(guards):
    """Rows like the calibration samples, and others."""
    draw = np.random.default_rng(0)
    known = draw.normal(size=(300, 10)) + 8 * np.eye(10)[draw.integers(0, 10, 300)] * draw.uniform(0.6, 1, (300, 1))
    return known, draw.normal(size=(200, 10)) * 1.5


def send(running, client, rows, cuts):
    """Judge rows in requests of these sizes, one after the other."""
    start, before = 0, running.count("inputs")
    for size in cuts:
        part = rows[start : start + size]
        assert client.post("/predict", part.tolist())[0] == 200
        start += len(part)
    running.judged(before + start)
    return rows[:start]


def test_evidence_is_that_of_a_monitor_fed_in_order_and_goes_on_after_a_restart(guards, copied, serving, streams):
    path, guard, (known, foreign) = copied(guards.logits), guards.logits.guard, streams
    own = Monitor(guard, run_length=100_000)
    with serving(path, run_length=100_000) as running:
        client = running.client()
        for rows, cuts in ((known, [1, 7, 100, 1, 64]), (foreign, [1, 2])):
            own.update(guard.predict(send(running, client, rows, cuts)))
        shown = client.get("/status")[1]["monitor"]
        assert (shown["inputs"], shown["evidence"], shown["alarm"]) == (176, pytest.approx(own.evidence), False)
    state = path.with_name("guard.safetensors.monitor.json")
    assert json.loads(state.read_text())["inputs"] == 176
    with serving(path, run_length=100_000) as running:
        client = running.client()
        assert client.get("/status")[1]["monitor"]["evidence"] == pytest.approx(own.evidence)
        own.update(guard.predict(send(running, client, foreign, [10] * 6)))
        status = client.get("/status")[1]
        shown = status["monitor"]
        assert own.alarm
        assert (shown["inputs"], shown["alarm"], shown["since"]) == (236, True, own.since)
        assert [(a["at"], a["since"]) for a in shown["alarms"]] == [(a.at, a.since) for a in own.alarms]
        assert abs(shown["alarms"][0]["time"] - time.time()) < PATIENCE
        assert (sum(status["hour"]["inputs"]), shown["promise"]) == (60, own.promise)
        assert client.post("/monitor/acknowledge", b"") == (200, {"acknowledged": len(own.alarms)})
        shown = client.get("/status")[1]["monitor"]
        assert (shown["alarm"], shown["alarms"], shown["alarm_count"]) == (False, [], own.alarm_count)
    assert json.loads(state.read_text())["alarms"] == []


def test_unread_inputs_are_counted_and_are_no_evidence(guards, copied, serving, streams):
    guard, rows = guards.logits.guard, streams[0][:9].copy()
    rows[4, 2] = np.nan
    with serving(copied(guards.logits)) as running:
        client = running.client()
        body = json.dumps({"logits": rows.tolist(), "on_error": "refuse"}).replace("NaN", "null").encode()
        assert client.post("/predict", body)[0] == 200
        running.judged(9)
        own = Monitor(guard)
        own.update(guard.predict(np.delete(rows, 4, axis=0)))
        status = client.get("/status")[1]
        assert (status["monitor"]["unread"], status["monitor"]["evidence"]) == (1, pytest.approx(own.evidence))
        assert (sum(status["hour"]["unread"]), sum(status["scores"]["hour"])) == (1, 8)


def test_a_reload_keeps_the_monitor_of_the_same_calibration_and_starts_one_for_another(
    guards, copied, serving, streams, caplog
):
    path, (known, foreign) = copied(guards.logits), streams
    other = igeood.load(path).calibrate(known[:200], tpr=0.9)
    with serving(path, run_length=100) as running:
        client, service = running.client(), running.service
        send(running, client, foreign, [20])
        evidence = client.get("/status")[1]["monitor"]
        assert evidence["alarm"]
        service.reload()  # without a loop that looks, it is done here
        service._reload()
        status = client.get("/status")[1]
        assert {**status["monitor"], "promise": 0} == {**evidence, "promise": 0}  # the alarm's time too
        assert (sum(status["hour"]["inputs"]), status["guard"]["reloads"]) == (20, 1)
        other.save(path)
        service._reload()
        status = client.get("/status")[1]
        assert (status["monitor"]["inputs"], status["monitor"]["alarm"], status["guard"]["tpr"]) == (0, False, 0.9)
        assert (status["monitor"]["run_length"], sum(status["hour"]["inputs"])) == (100, 0)
        own = Monitor(other, run_length=100)
        own.update(other.predict(send(running, client, known[200:], [5, 5])))
        assert client.get("/status")[1]["monitor"]["evidence"] == pytest.approx(own.evidence)
        assert metrics(client)["igeood_inputs_total"] == 30
    said = [record.fields for record in caplog.records if record.getMessage() == "reloaded"]
    assert [fields["monitor_goes_on"] for fields in said] == [True, False]
    with serving(path, run_length=100) as running:
        assert running.service.served.monitor.inputs == 10


def test_a_state_of_another_guard_or_of_other_options_is_refused(guards, copied, serving):
    path = copied(guards.logits)
    with serving(path):
        pass
    with pytest.raises(igeood.errors.InputError) as caught:
        Service(path, options=Options(run_length=7.0))
    assert caught.value.argument == "run_length"
    path.write_bytes(guards.named.path.read_bytes())
    with pytest.raises(igeood.errors.InputError):
        Service(path)
    state = path.with_name("new") / "state.json"
    with serving(path, state=state) as running:
        assert running.service.served.monitor.inputs == 0
        with pytest.raises(igeood.errors.InputError):  # it is taken
            Service(path, options=Options(state=state))
    path.with_name("broken.json").write_text("{")
    with pytest.raises(igeood.errors.GuardFileError):
        Service(path, options=Options(state=path.with_name("broken.json")))


def test_inputs_of_bad_requests_are_counted_and_alarms_are_logged(guards, copied, serving, caplog):
    with serving(copied(guards.logits)) as running:
        client = running.client()
        assert client.post("/predict", [[None] * 10] * 3)[0] == 400
        assert client.post("/predict", [[1.0] * 9] * 2)[0] == 400
        assert "igeood_rejected_total 5.0" in client.get("/metrics")[1].decode()
        running.service.served.monitor.run_length = 2.0
        client.post("/predict", guards.logits.inputs["logits"].tolist())
        running.judged(40)
        assert client.post("/monitor/acknowledge", {})[1]["acknowledged"] > 0
    assert {"alarm", "acknowledged"} <= {record.getMessage() for record in caplog.records}


def test_a_state_that_could_not_be_written_is_written_again(guards, copied, serving, streams, monkeypatch, caplog):
    def fails(*_):
        raise OSError("disk full")

    path = copied(guards.logits)
    with serving(path) as running:
        send(running, running.client(), streams[0], [3])
        with monkeypatch.context() as patch:
            patch.setattr(module, "write_whole", fails)
            running.service._save()
        assert caplog.messages[-1] == "state not saved"
    assert json.loads(path.with_name("guard.safetensors.monitor.json").read_text())["inputs"] == 3


def metrics(client):
    """Values of the metrics without labels, or with those of a histogram's sums, by name."""
    status, text = client.get("/metrics")
    assert (status, client.headers["content-type"].split(";")[0]) == (200, "text/plain")
    families = [*text_string_to_metric_families(text.decode())]
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


def families_of(client):
    families = text_string_to_metric_families(client.get("/metrics")[1].decode())
    return {family.name: family for family in families}


def test_metrics_are_those_of_the_dashboard_and_count_right(guards, copied, serving, streams):
    with serving(copied(guards.logits)) as running:
        client, rows = running.client(), np.concatenate([streams[0][:60], streams[1][:40]])
        send(running, client, rows, [10] * 10)
        body = json.dumps({"logits": [[None] * 10, *rows[:3].tolist()], "on_error": "refuse"}).encode()
        assert client.post("/predict", body)[0] == 200
        running.judged(104)
        assert client.post("/predict", b"[]")[0] == 400
        assert client.get("/nothing")[0] == 404
        found, values = families_of(client), metrics(client)
        guard = guards.logits.guard
        verdict = guard.predict(np.concatenate([rows, rows[:3]]))
        assert values["igeood_inputs_total"] == 104
        assert values["igeood_ood_total"] == verdict.is_ood.sum()
        assert (values["igeood_unread_total"], values["igeood_queue_length"]) == (1, 0)
        assert values["igeood_threshold"] == guard.threshold
        assert values["igeood_expected_ood_share"] == pytest.approx(0.05)
        assert values["igeood_monitor_evidence"] == running.service.served.monitor.evidence
        assert values["igeood_monitor_run_length"] == 1e6
        requests = {(s.labels["path"], s.labels["status"]): s.value for s in found["igeood_requests"].samples}
        assert requests == {("predict", "200"): 11, ("predict", "400"): 1, ("other", "404"): 1}
        (info,) = found["igeood_info"].samples
        assert info.labels["promise"] == guard.promise
        assert (info.labels["method"], info.labels["access"]) == ("igeood-logits", "black box")
        for name, column in (("score", verdict.score), ("p_value", verdict.p_value)):
            check_histogram(found[f"igeood_{name}"], np.asarray(column))
        check_histogram(found["igeood_batch_inputs"], np.array([10] * 10 + [4]))
        count = [s.value for s in found["igeood_request_seconds"].samples if s.name.endswith("_count")]
        assert sorted(count) == [1, 12]
    texts = "".join((EXAMPLES / name).read_text(encoding="utf-8") for name in ("grafana.json", "alerts.yml"))
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"igeood_\w+", texts)}
    kinds = {family.name: family.type for family in found.values()}
    assert shown == {f"{name}_total" if kind == "counter" else name for name, kind in kinds.items()}


def check_histogram(family, values):
    sums = {sample.name.removeprefix(family.name): sample.value for sample in family.samples if not sample.labels}
    buckets = [(float(s.labels["le"]), s.value) for s in family.samples if s.name.endswith("_bucket")]
    bounds = [bound for bound, _ in buckets]
    assert (bounds, bounds[-1]) == (sorted(set(bounds)), np.inf)
    if bounds[0] >= 0:  # else Prometheus has no sum
        assert sums == {"_count": len(values), "_sum": pytest.approx(values.sum())}
    assert [count for _, count in buckets] == [(values <= bound).sum() for bound in bounds]


SCORES = [np.full(1000, 3.0), -1.5707963 + 1e-12 * np.arange(1000), 1e300 * np.arange(1, 1001)]


@pytest.mark.parametrize("scores", SCORES)
def test_bounds_of_scores_are_apart_however_close_or_large_the_scores(scores):
    recent = Recent(igeood.calibration.Calibration(igeood.outputs.as_tensor(scores, "scores")[0]))
    ends = [sample.labels["le"] for sample in recent.scores.family("a", "b").samples if "le" in sample.labels]
    assert len(set(ends)) == len(ends) == module.BINS
    assert sum(recent.record()["scores"]["calibration"]) == pytest.approx(1)


def test_bins_count_up_to_and_with_their_bounds():
    bins, values = Bins([1, 2, 4]), np.array([0.5, 1, 1.5, 2, 4, 4.5, 100])
    assert bins.add(values[:3]).tolist() == [2, 1, 0, 0]
    bins.add(values[3:])
    check_histogram(bins.family("a", "b"), values)


def test_an_hour_forgets_what_is_older(guards, monkeypatch):
    now = 1_000_000.0
    monkeypatch.setattr(module.time, "time", lambda: now)
    recent = Recent(guards.logits.guard.calibration)
    for seconds, inputs in ((0, 1), (9, 2), (3590, 4), (3605, 8)):
        now = 1_000_000.0 + seconds
        recent.add((inputs, 0, 0), 1.0, np.zeros(inputs))
    hour = recent.record()["hour"]
    assert [n for n in hour["inputs"] if n] == [4, 8]  # the first bucket was the same as the last
    assert [value for value in hour["evidence"] if value is not None] == [1.0, 1.0]
    assert hour["start"] + 360 * 10 == 1_003_610
    now += 7200
    assert sum(recent.record()["hour"]["inputs"]) == 0
