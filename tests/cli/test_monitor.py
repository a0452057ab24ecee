"""`igeood monitor`: what the library says of verdict files, whatever their kind; a clear line where they are no use."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import igeood
from igeood.guard.file import load_calibration

KINDS = ("parquet", "csv", "jsonl")


def parts_of(known):
    """Logits of 400 inputs as before, two of which cannot be read, and of 100 OOD ones."""
    first = known.test.logits.numpy().copy()
    first[[7, 250]] = np.nan
    return {"first": first, "then": known.ood.logits[:100].numpy()}


@pytest.fixture(scope="module")
def scored(made, known, good, tmp_path_factory):
    """Verdicts in every kind of file, of two guards."""
    folder = tmp_path_factory.mktemp("scored")
    guard = igeood.load(made / "guard.safetensors")
    guard.save(folder / "guard.safetensors")
    guard.calibrate(known.held_out.logits, guarantee="tolerance").save(folder / "strict.safetensors")
    for name, logits in parts_of(known).items():
        rows = {"logits": logits.tolist(), "id": [f"{name}-{i}" for i in range(len(logits))]}
        pq.write_table(pa.table(rows), folder / f"{name}.parquet")
        for kind in KINDS:
            for file in ("guard", "strict"):
                out = folder / f"{file}-{name}.{kind}"
                good("score", folder / f"{file}.safetensors", folder / f"{name}.parquet", "--out", out)
    return folder


@pytest.fixture
def place(scored, made, monkeypatch, tmp_path):
    """The folder as the current one, with room of its own to write in: names there are links."""
    for source in (*scored.iterdir(), made / "fitted.safetensors", made / "test.parquet"):
        (tmp_path / source.name).symlink_to(source)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(kind, guard="guard"):
    return [f"{guard}-{name}.{kind}" for name in ("first", "then")]


@pytest.fixture
def watch(good):
    """Runs the command; returns its answer."""
    return lambda *words: json.loads(good("monitor", *words, "--json"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("watched", ["p-values", "flags"])
def test_every_kind_of_file_says_what_the_library_says(watch, place, known, kind, watched):
    name = "strict" if watched == "flags" else "guard"
    answer = watch(f"{name}.safetensors", *names(kind, name), "--kind", watched, "--seed", 3)
    guard = igeood.load(f"{name}.safetensors")
    expected = igeood.Monitor(guard, kind=watched, seed=3)
    for logits in parts_of(known).values():
        expected.update(guard.predict(logits, on_error="refuse"))
    assert answer["evidence"] == pytest.approx(expected.evidence, rel=1e-9)
    for field in ("inputs", "unread", "alarm", "since", "promise", "run_length", "kind", "seed"):
        assert answer[field] == getattr(expected, field)
    assert (answer["inputs"], answer["unread"], answer["new_alarms"]) == (500, 2, expected.alarm_count)
    assert [(a["at"], a["since"]) for a in answer["alarms"]] == [a[:2] for a in expected.alarms]
    first = answer["alarms"][0]
    assert 400 <= first["since"] <= first["at"] < 420
    assert (first["id"], first["since_id"]) == (f"then-{first['at'] - 400}", f"then-{first['since'] - 400}")


def test_a_folder_is_its_files(watch, place, monkeypatch):
    monkeypatch.setattr("igeood.tables.BLOCK_VALUES", 64)  # an alarm's id, and its start's, may be of another block
    whole = watch("guard.safetensors", *names("parquet"))
    (place / "parts").mkdir()
    table = pa.concat_tables(map(pq.read_table, names("parquet")))
    for number, start in enumerate(range(0, 500, 90)):
        pq.write_table(table.slice(start, 90), place / "parts" / f"{number}.parquet")
    pq.write_table(table.slice(0, 0), place / "parts" / "5b.parquet")
    answer = watch("guard.safetensors", "parts")
    places = [[(a["at"], a["since"], a["id"], a["since_id"]) for a in each["alarms"]] for each in (answer, whole)]
    assert places[0] == places[1]
    assert answer["evidence"] == pytest.approx(whole["evidence"], rel=1e-9)


def test_a_state_goes_on(bad, watch, place):
    whole = watch("guard.safetensors", *names("parquet"), "--run-length", 5000)
    first, then = names("parquet")
    state = ["--state", "new/state.json"]
    calm = watch("guard.safetensors", first, *state, "--run-length", 5000)
    assert (calm["inputs"], calm["alarm"], calm["state"]) == (400, False, "new/state.json")
    answer = watch("guard.safetensors", then, *state)
    assert answer["evidence"] == pytest.approx(whole["evidence"], rel=1e-9)
    assert [a["id"] for a in answer["alarms"]] == [a["id"] for a in whole["alarms"]]
    for name in ("inputs", "unread", "since", "new_alarms", "run_length"):
        assert answer[name] == whole[name]
    later = watch("guard.safetensors", first, *state)
    assert (later["alarm"], later["new_alarms"], later["inputs"]) == (True, 0, 900)
    assert (later["alarms"][0]["id"], later["alarms"][0]["at"]) == (None, answer["alarms"][0]["at"])
    forgotten = watch("guard.safetensors", first, *state, "--acknowledge")
    assert (forgotten["alarm"], forgotten["alarms"]) == (False, [])
    before = Path("new/state.json").read_bytes()
    for guard, words, fact in (
        ("guard", ["--run-length", "9000"], "--run-length"),
        ("guard", ["--kind", "flags"], "--kind"),
        ("guard", ["--seed", "4"], "--seed"),
        ("strict", [], "new/state.json"),
    ):
        assert fact in bad("monitor", f"{guard}.safetensors", first, *state, *words)
    assert Path("new/state.json").read_bytes() == before


WRONG = {  # a line, and what its error has to name
    "guard.safetensors none.csv": "none.csv",
    "guard.safetensors test.parquet": "test.parquet: score",
    "guard.safetensors empty.csv": "empty.csv",
    "guard.safetensors header.csv": "verdicts",
    "guard.safetensors guard-first.parquet cut.parquet": "cut.parquet",
    "guard.safetensors guard-first.parquet text.csv": "text.csv: .*high",
    "guard.safetensors hole.csv": "hole.csv: .*row 1",
    "guard.safetensors hole.jsonl": "hole.jsonl: .*row 1",
    "guard.safetensors twice.parquet": "twice.parquet: score",
    "guard.safetensors other.parquet": r"other.parquet: .*row \d+",
    "strict.safetensors unflagged.parquet --kind flags": "unflagged.parquet: is_ood",
    "strict.safetensors unsure.parquet --kind flags": "unsure.parquet",
    "strict.safetensors guard-first.csv --kind flags": r"guard-first.csv: .*row \d+",
    "guard.safetensors guard-first.csv --kind flags": "--kind: .*--kind p-values",
    "fitted.safetensors guard-first.csv": "fitted.safetensors",
    "guard.safetensors guard-first.csv --picture p.gif": "--picture",
    "guard.safetensors guard-first.csv --picture guard-first.csv": "--picture",
    "guard.safetensors guard-first.csv --picture hole.csv": "--picture: .*--force",
}


def test_files_that_are_no_use_are_one_line_each(bad, place):
    table = pq.read_table("guard-first.parquet")
    Path("empty.csv").touch()
    Path("header.csv").write_text(Path("guard-first.csv").read_text().partition("\n")[0] + "\n")
    Path("cut.parquet").write_bytes(Path("guard-first.parquet").read_bytes()[:-100])
    Path("text.csv").write_text("id,score\na,0.5\nb,high\n")
    Path("hole.csv").write_text("id,score\na,0.5\nb,\n")
    Path("hole.jsonl").write_text('{"id": 1, "score": 0.5}\n{"id": 2, "score": null}\n')
    pq.write_table(table.drop_columns("is_ood"), "unflagged.parquet")
    pq.write_table(table.set_column(3, "is_ood", pa.array(["maybe"] * 400)), "unsure.parquet")
    pq.write_table(table.append_column("score", table["score"]), "twice.parquet")
    pq.write_table(table.set_column(2, "p_value", pa.array(np.full(400, 0.5))), "other.parquet")
    for line, fact in WRONG.items():
        picture = [] if "--picture" in line else ["--picture", "p.svg"]
        assert re.search(fact, bad("monitor", *line.split(), *picture, "--state", "s.json")), line
        assert not [path for path in ("s.json", "p.svg", "p.gif") if Path(path).exists()], line


@pytest.mark.parametrize("is_alarm", [True, False])
def test_rows_with_a_reason_are_no_evidence_and_null_in_json_is_infinite(watch, place, is_alarm):
    """In JSON lines, whose first rows have no reason, and no infinity."""
    row = {"id": 0, "score": -1e6, "is_ood": False, "reason": None}
    rows = [row] * 50 + [{**row, "score": None, "is_ood": True, "reason": "damaged"}] * 20
    rows += [{**row, "score": None, "is_ood": is_alarm}] * 20
    Path("v.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    answer = watch("guard.safetensors", "v.jsonl")
    assert (answer["inputs"], answer["unread"], answer["alarm"]) == (90, 20, is_alarm)
    assert not is_alarm or answer["since"] == 70


def test_the_score_is_all_that_is_needed(watch, place):
    answer = watch("guard.safetensors", *names("csv"))
    for name in names("csv"):
        with Path(name).open() as file:
            scores = [row["score"] for row in csv.DictReader(file) if not row["reason"]]
        Path(f"bare-{name}").write_text("\n".join(["score", *scores, ""]))
    bare = watch("guard.safetensors", *(f"bare-{name}" for name in names("csv")))
    assert bare["evidence"] == pytest.approx(answer["evidence"], rel=1e-9)
    first = bare["alarms"][0]
    assert (bare["inputs"], first["at"], first["id"]) == (498, answer["alarms"][0]["at"] - 2, None)


def test_the_guards_model_is_not_needed(images, place, monkeypatch, good):
    monkeypatch.syspath_prepend(images)
    model = ["--model", "nets:make"]
    good("fit", images / "train", "--out", "m.safetensors", "--size", 8, "--method", "msp", *model)
    good("calibrate", "m.safetensors", images / "held", *model)
    good("score", "m.safetensors", images / "held", "--out", "m.csv", *model)
    assert "inputs: 75\n" in good("monitor", "m.safetensors", "m.csv")
    assert load_calibration("m.safetensors").tpr == 0.95


@pytest.mark.parametrize(("kind", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_picture_of_the_evidence(watch, place, kind, start):
    for files in (names("csv"), names("csv")[:1]):
        answer = watch("guard.safetensors", *files, "--picture", f"p.{kind}", "--force")
        assert (answer["picture"], Path(f"p.{kind}").read_bytes()[: len(start)]) == (f"p.{kind}", start)
