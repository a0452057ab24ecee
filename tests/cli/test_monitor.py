"""`igeood monitor`: what the library says of verdict files, whatever their kind; a clear line where they are no use."""

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import igeood
from igeood.cli._evidence import POINTS, Trace
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
    for name, logits in parts_of(known).items():
        rows = {"logits": logits.tolist(), "id": [f"{name}-{i}" for i in range(len(logits))]}
        pq.write_table(pa.table(rows), folder / f"{name}.parquet")
    guard = igeood.load(made / "guard.safetensors")
    guard.save(folder / "guard.safetensors")
    guard.calibrate(known.held_out.logits, guarantee="tolerance").save(folder / "strict.safetensors")
    for name, kind in ((name, kind) for name in ("first", "then") for kind in KINDS):
        for prefix, file in (("", "guard"), ("strict-", "strict")):
            out = folder / f"{prefix}{name}.{kind}-scores.{kind}"
            good("score", folder / f"{file}.safetensors", folder / f"{name}.parquet", "--out", out)
    return folder


@pytest.fixture
def place(scored, made, monkeypatch, tmp_path):
    """The folder as the current one, with room of its own to write in: names there are links."""
    for source in (*scored.iterdir(), made / "fitted.safetensors", made / "test.parquet"):
        (tmp_path / source.name).symlink_to(source)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def without_rounding(text):
    """An answer whose numbers are rounded: blocks of other sizes add in another order."""
    return json.loads(text, parse_float=lambda number: f"{float(number):.9g}")


def names(kind, prefix=""):
    return [f"{prefix}{name}.{kind}-scores.{kind}" for name in ("first", "then")]


def expected(place, known, kind="p-values", **options):
    """The library's monitor after the same inputs."""
    guard = igeood.load(place / ("strict.safetensors" if kind == "flags" else "guard.safetensors"))
    watcher = igeood.Monitor(guard, kind=kind, **options)
    for logits in parts_of(known).values():
        watcher.update(guard.predict(logits, on_error="refuse"))
    return watcher


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("watched", ["p-values", "flags"])
def test_every_kind_of_file_says_what_the_library_says(good, place, known, kind, watched):
    guard, prefix = ("strict.safetensors", "strict-") if watched == "flags" else ("guard.safetensors", "")
    told = json.loads(good("monitor", guard, *names(kind, prefix), "--kind", watched, "--seed", 3, "--json"))
    watcher = expected(place, known, watched, seed=3)
    assert told["evidence"] == pytest.approx(watcher.evidence, rel=1e-9)
    for name in ("inputs", "unread", "alarm", "since", "promise", "run_length", "kind", "seed"):
        assert told[name] == getattr(watcher, name)
    assert (told["inputs"], told["unread"], told["new_alarms"]) == (500, 2, watcher.alarm_count)
    assert [(a["at"], a["since"]) for a in told["alarms"]] == [a[:2] for a in watcher.alarms]
    first = told["alarms"][0]
    assert 400 <= first["since"] <= first["at"] < 420
    assert (first["id"], first["since_id"]) == (f"then-{first['at'] - 400}", f"then-{first['since'] - 400}")


def test_a_person_reads_when_how_strongly_and_what_is_promised(run, place, known, caplog):
    result = run("monitor", "guard.safetensors", *names("csv"))
    watcher, lines = expected(place, known), dict(line.split(": ", 1) for line in result.stdout.splitlines())
    first = watcher.alarms[0]
    assert list(lines)[:5] == ["inputs", "unread", "evidence", "alarms", "alarm 1"]
    assert (lines["inputs"], lines["unread"], lines["alarms"]) == ("500", "2", str(watcher.alarm_count))
    assert lines["alarm 1"].startswith(f"at input {first.at} (then-{first.at - 400}), evidence {first.evidence:,.0f}; ")
    assert lines["alarm 1"].endswith(f"changed since about input {first.since} (then-{first.since - 400})")
    assert lines["promise"] == watcher.promise
    assert "drift from the first input on is partly learnt as normal" in caplog.text  # on stderr
    calm = run("monitor", "guard.safetensors", names("csv")[0])
    assert (calm.exit_code, "alarms: none\n" in calm.stdout) == (0, True)


def test_a_folder_or_a_pattern_is_the_files(good, place, monkeypatch):
    monkeypatch.setattr("igeood.tables.BLOCK_VALUES", 64)  # an alarm's id, and its start's, may be of another block
    whole = without_rounding(good("monitor", "guard.safetensors", *names("parquet"), "--json"))
    (place / "parts").mkdir()
    table = pa.concat_tables(map(pq.read_table, names("parquet")))
    for number, start in enumerate(range(0, 500, 90)):
        pq.write_table(table.slice(start, 90), place / "parts" / f"{number}.parquet")
    pq.write_table(table.slice(0, 0), place / "parts" / "5b.parquet")
    for words in (["parts"], ["parts/*.parquet"], [f"parts/{i}.parquet" for i in range(6)]):
        assert without_rounding(good("monitor", "guard.safetensors", *words, "--json")) == whole


def test_a_state_goes_on(run, good, place):
    whole = json.loads(good("monitor", "guard.safetensors", *names("parquet"), "--json", "--run-length", 5000))
    first, then = names("parquet")
    options = ["--state", "new/state.json", "--json"]
    calm = json.loads(good("monitor", "guard.safetensors", first, *options, "--run-length", 5000))
    assert (calm["inputs"], calm["alarm"], calm["state"]) == (400, False, "new/state.json")
    told = json.loads(good("monitor", "guard.safetensors", then, *options))
    assert told["evidence"] == pytest.approx(whole["evidence"], rel=1e-9)
    assert [a["id"] for a in told["alarms"]] == [a["id"] for a in whole["alarms"]]
    assert {name: told[name] for name in ("inputs", "unread", "since", "new_alarms", "run_length")} == {
        name: whole[name] for name in ("inputs", "unread", "since", "new_alarms", "run_length")
    }
    later = json.loads(good("monitor", "guard.safetensors", first, *options))
    assert (later["alarm"], later["new_alarms"], later["inputs"]) == (True, 0, 900)
    assert (later["alarms"][0]["id"], later["alarms"][0]["at"]) == (None, told["alarms"][0]["at"])
    forgotten = json.loads(good("monitor", "guard.safetensors", first, *options, "--acknowledge"))
    assert (forgotten["alarm"], forgotten["alarms"]) == (False, [])
    before = Path("new/state.json").read_bytes()
    for option, value, line in (
        ("--run-length", "9000", "--run-length: new/state.json has 5000, not 9000; leave it out, or name another"),
        ("--kind", "flags", "--kind: new/state.json has p-values, not flags"),
        ("--seed", "4", "--seed: new/state.json has 0, not 4"),
    ):
        result = run("monitor", "guard.safetensors", first, *options, option, value)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.splitlines()[-1].startswith(f"igeood: {line}")
    other = run("monitor", "strict.safetensors", first, *options)
    assert "new/state.json is the state of a monitor of another guard" in other.stderr
    assert Path("new/state.json").read_bytes() == before


def rewritten(change, out):
    """Verdicts with some columns changed."""
    table = pq.read_table(names("parquet")[0])
    pq.write_table(change(table), out)
    return out


def test_files_that_are_no_use_are_one_line_each(run, place):
    content = Path(names("parquet")[0]).read_bytes()
    Path("empty.csv").touch()
    Path("header.csv").write_text(Path(names("csv")[0]).read_text().partition("\n")[0] + "\n")
    Path("cut.parquet").write_bytes(content[:-100])
    Path("text.csv").write_text("id,score\na,0.5\nb,high\n")
    Path("hole.csv").write_text("id,score\na,0.5\nb,\n")
    Path("hole.jsonl").write_text('{"id": 1, "score": 0.5}\n{"id": 2, "score": null}\n')
    rewritten(lambda table: table.drop_columns("is_ood"), "unflagged.parquet")
    rewritten(lambda table: table.set_column(3, "is_ood", pa.array(["maybe"] * 400)), "unsure.parquet")
    rewritten(lambda table: table.append_column("score", table["score"]), "twice.parquet")
    rewritten(lambda table: table.set_column(2, "p_value", pa.array(np.full(400, 0.5))), "other.parquet")
    old = names("parquet")
    for words, line in (
        (["guard.safetensors", "none.csv"], "none.csv: "),
        (["guard.safetensors", "test.parquet"], "test.parquet: score: "),
        (["guard.safetensors", "empty.csv"], "empty.csv: "),
        (["guard.safetensors", "header.csv"], "verdicts: "),
        (["guard.safetensors", old[0], "cut.parquet"], "cut.parquet: "),
        (["guard.safetensors", old[0], "text.csv"], "text.csv: .*high"),
        (["guard.safetensors", "hole.csv"], "hole.csv: verdicts: row 1 "),
        (["guard.safetensors", "hole.jsonl"], "hole.jsonl: verdicts: row 1 "),
        (["guard.safetensors", "twice.parquet"], "twice.parquet: score: "),
        (["strict.safetensors", "unflagged.parquet", "--kind", "flags"],
         "unflagged.parquet: is_ood: "),
        (["strict.safetensors", "unsure.parquet", "--kind", "flags"], "unsure.parquet: "),
        (["strict.safetensors", *old, "--kind", "flags"],
         rf"{old[0]}: verdicts: row \d+ "),
        (["guard.safetensors", "other.parquet"], r"other.parquet: verdicts: row \d+ "),
        (["guard.safetensors", *old, "--kind", "flags"],
         "kind: 'flags' needs .*; run `igeood calibrate` with --guarantee tolerance .*, or watch --kind p-values"),
        (["fitted.safetensors", *old],
         "guard: fitted.safetensors has no threshold yet; run `igeood calibrate fitted.safetensors held-out.parquet`"),
        (["guard.safetensors", *old, "--picture", "p.gif"], "picture: expected a name that ends with .png or .svg"),
        (["guard.safetensors", *old, "--picture", old[0]], f"picture: {old[0]} is what the command reads"),
        (["guard.safetensors", *old, "--picture", "hole.csv"], "picture: hole.csv is there already; .* give --force"),
    ):  # fmt: skip
        given = [*words, *([] if "--picture" in words else ["--picture", "p.svg"]), "--state", "s.json"]
        result = run("monitor", *given)
        assert (result.exit_code, result.stdout) == (2, ""), words
        *messages, last = result.stderr.splitlines()
        assert not [text for text in messages if text.startswith(("igeood: ", "Traceback"))]
        assert re.match(f"igeood: {line}", last), last
        assert not [path for path in ("s.json", "p.svg", "p.gif") if Path(path).exists()], words


def test_rows_with_a_reason_are_no_evidence_and_null_in_json_is_infinite(good, place):
    """In JSON lines, whose first rows have no reason, and no infinity."""
    row = {"id": 0, "score": -1e6, "is_ood": False, "reason": None}
    rows = [row] * 50 + [{**row, "score": None, "is_ood": True, "reason": "damaged"}] * 20
    for is_alarm in (True, False):
        infinite = [{**row, "score": None, "is_ood": is_alarm}] * 20
        Path("v.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows + infinite))
        told = json.loads(good("monitor", "guard.safetensors", "v.jsonl", "--json"))
        assert (told["inputs"], told["unread"], told["alarm"]) == (90, 20, is_alarm)
        assert not is_alarm or told["since"] == 70


def test_the_score_is_all_that_is_needed(good, place):
    told = json.loads(good("monitor", "guard.safetensors", *names("csv"), "--json"))
    for name in names("csv"):
        with Path(name).open() as file:
            rows = [row for row in csv.DictReader(file) if not row["reason"]]
        Path(f"bare-{name}").write_text("score\n" + "".join(f"{row['score']}\n" for row in rows))
    bare = json.loads(good("monitor", "guard.safetensors", *(f"bare-{name}" for name in names("csv")), "--json"))
    assert bare["evidence"] == pytest.approx(told["evidence"], rel=1e-9)
    assert (bare["inputs"], bare["alarms"][0]["at"], bare["alarms"][0]["id"]) == (
        498,
        told["alarms"][0]["at"] - 2,
        None,
    )


def test_the_guards_model_is_not_needed(images, known, place, monkeypatch, run, good):
    monkeypatch.syspath_prepend(images)
    model = ["--model", "nets:make"]
    run("fit", f"folder:{images / 'train'}", "--out", "m.safetensors", "--size", 8, "--method", "msp", *model)
    good("calibrate", "m.safetensors", f"folder:{images / 'held'}", *model)
    good("score", "m.safetensors", f"folder:{images / 'held'}", "--out", "m.csv", *model)
    assert "inputs: 75\n" in good("monitor", "m.safetensors", "m.csv")
    assert load_calibration("m.safetensors").tpr == 0.95


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_picture_of_the_evidence(good, place, kind, monkeypatch):
    contents = []
    for files in (names("csv"), names("csv"), names("csv")[:1]):
        told = json.loads(good("monitor", "guard.safetensors", *files, "--picture", f"p.{kind}", "--force", "--json"))
        assert told["picture"] == f"p.{kind}"
        contents.append(Path(f"p.{kind}").read_bytes())
    assert contents[0] == contents[1] != contents[2]
    assert contents[0].startswith(b"\x89PNG" if kind == "png" else b"<?xml")


def test_without_matplotlib_a_picture_is_an_error_that_says_what_to_install(run, place, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("monitor", "guard.safetensors", *names("csv"), "--picture", "p.png")
    assert result.stderr == "igeood: matplotlib is needed; pip install 'igeood[report]'\n"
    assert (result.exit_code, Path("p.png").exists()) == (2, False)


@pytest.mark.parametrize("inputs", [1, POINTS, POINTS + 1, 7 * POINTS + 3, 100_000])
def test_few_points_keep_every_peak(inputs):
    evidence, trace = np.random.default_rng(0).random(inputs), Trace(1000)
    for part in np.array_split(evidence, 7):
        trace.add(part)
    numbers, peaks = trace.points()
    assert len(numbers) == len(peaks) <= POINTS
    assert numbers[-1] == 1000 + inputs - 1
    starts = np.append(0, numbers[:-1] - 999)
    assert peaks.tolist() == np.maximum.reduceat(evidence, starts).tolist()
