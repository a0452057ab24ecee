"""Many files: one output for each input, the same from every engine, whoever dies meanwhile."""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import igeood
from igeood.cli import main
from igeood.scale import engines

IGEOOD = [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
          "from igeood.cli import main; main()"]  # fmt: skip
PATIENCE = 240  # seconds, on a busy machine
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run(*words):
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="igeood")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Twelve files in two folders, two guards, and what one of them says of the files."""
    folder, draw = tmp_path_factory.mktemp("made"), np.random.default_rng(0)

    def logits(n):
        labels = draw.integers(0, 10, n)
        return (draw.normal(size=(n, 10)) + 4 * np.eye(10)[labels]).astype(np.float32), labels

    guard = igeood.black_box().fit(*logits(2000))
    guard.save(folder / "bare.safetensors")
    guard.calibrate(logits(500)[0]).save(folder / "guard.safetensors")
    for i in range(12):
        igeood.write_logits(folder / "in" / f"day={i % 2}" / f"{i:02}.parquet", *logits(15_000))
    result = run("score", folder / "guard.safetensors", folder / "in", "--out", f"{folder / 'whole'}/", "--json")
    record = json.loads(result.stdout)
    assert (record["files"], record["done"], record["rows"], record["failed"]) == (12, 12, 180_000, {})
    return folder


@pytest.fixture
def few(made, tmp_path, monkeypatch):
    """A folder of small files of several kinds as the current folder."""
    for name in ("guard", "bare"):
        shutil.copy(made / f"{name}.safetensors", tmp_path)
    monkeypatch.chdir(tmp_path)
    logits = np.random.default_rng(1).normal(size=(30, 10)).astype(np.float32)
    for name in ("in/a.parquet", "in/b.npz", "in/sub/a.parquet"):
        igeood.write_logits(name, logits + len(name))
    Path("empty").mkdir()
    pq.write_table(pa.table({"logits": pa.array([], pa.list_(pa.float32()))}), "empty/none.parquet")
    Path("text").mkdir()
    lists = [json.dumps({"logits": row.tolist()}) for row in logits]
    Path("text/u.jsonl").write_text("\n".join(lists))
    Path("text/t.csv").write_text("logits\n" + "".join(f'"{row.tolist()}"\n' for row in logits))
    return tmp_path


def contents(folder):
    """The files of a folder but for leftovers of the dead, which nobody reads."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file() and p.name[0] != "."
    }


def test_each_output_is_what_scoring_that_file_alone_writes(few):
    record = json.loads(run("score", "guard.safetensors", "in", "text/*", "empty", "--out", "out/", "--json").stdout)
    assert (record["files"], record["rows"]) == (6, 150)
    pairs = {"in/a.parquet": "a.parquet", "in/b.npz": "b.npz.parquet", "in/sub/a.parquet": "sub/a.parquet",
             "text/t.csv": "t.csv", "text/u.jsonl": "u.jsonl", "empty/none.parquet": "none.parquet"}  # fmt: skip
    assert pq.read_table("out/none.parquet").drop(["id"]).schema == pq.read_table("out/a.parquet").drop(["id"]).schema
    assert set(contents("out")) == {*pairs.values(), "_manifest.json"}
    for source, output in pairs.items():
        assert (
            run("score", "guard.safetensors", source, "--out", "alone" + Path(output).suffix, "--force").exit_code == 0
        )
        assert Path("alone" + Path(output).suffix).read_bytes() == Path("out", output).read_bytes()
    one = run("score", "guard.safetensors", "out/a.parquet", "out")  # the manifest is no data; scores are no logits
    assert "expected one column 'logits'" in one.stderr


def test_what_is_there_is_left_unless_its_input_changed_or_force_is_given(few):
    def done(*words):
        result = run("score", *words, "--out", "out/", "--json")
        record = json.loads(result.stdout) if result.exit_code == 0 else {}
        return result.exit_code, record.get("done"), record.get("skipped"), result.stderr

    score = ("guard.safetensors", "in")
    assert done(*score)[:3] == (0, 3, 0)
    assert done(*score)[:3] == (0, 0, 3)
    Path("out/sub/a.parquet").unlink()
    assert done(*score)[:3] == (0, 1, 2)
    igeood.write_logits("in/a.parquet", np.eye(10) * 5)
    igeood.write_logits("in/new.parquet", np.eye(10) * 5)
    assert done(*score)[:3] == (0, 2, 2)
    before = contents("out")
    for words, message in (
        (("bare.safetensors", "in"), "out: out was made with another guard ("),
        ((*score, "--on-error", "raise"), "out: out was made with another on_error (None, this one is raise); name"),
        ((*score, "--logits-column", "z"), "out: out was made with another columns ("),
        ((*score, "--force", "--logits-column", "z"), "4 of 4 files failed"),
    ):
        code, _, _, said = done(*words)
        assert (code, message in said) == (2, True), said
        assert contents("out") == before or "--force" in words
    Path("out/a.parquet").write_bytes(b"stray")
    assert done(*score, "--force")[:3] == (0, 4, 0)
    assert done("guard.safetensors", "in/a.parquet", "--force")[:3] == (0, 1, 0)
    assert {*contents("out")} - {"_manifest.json"} == {"a.parquet", "b.npz.parquet", "new.parquet", "sub/a.parquet"}
    igeood.write_logits("other/a.parquet", np.eye(10) * 5)
    said = done("guard.safetensors", "other")[3]
    assert re.search(r"out: out/a.parquet was made of .*/in/a.parquet, not of .*/other/a.parquet; name another", said)
    igeood.write_logits("in/mine.parquet", np.eye(10) * 5)
    Path("out/mine.parquet").write_bytes(b"mine")
    assert "out/mine.parquet is there, and the manifest does not have it" in done(*score)[3]
    Path("out/mine.parquet").unlink()
    Path("in/mine.parquet").unlink()
    assert done("bare.safetensors", "in", "--force")[:3] == (0, 4, 0)
    noted = json.loads(Path("out/_manifest.json").read_text())
    Path("out/_manifest.json").write_text(json.dumps({**noted, "units": {"../guard.safetensors": [0, 0]}}))
    assert "_manifest.json is damaged" in done(*score, "--force")[3]
    assert Path("guard.safetensors").exists()
    Path("out/_manifest.json").unlink()
    assert "out has files, and no _manifest.json" in done(*score, "--force")[3]


def test_a_file_that_fails_does_not_stop_the_others(few):
    Path("in/bad.parquet").write_bytes(b"PAR1 half")
    np.savez("in/nan.npz", logits=np.full((1, 10), np.nan))
    result = run("score", "guard.safetensors", "in", "--out", "out/", "--json")
    record = json.loads(result.stdout)
    assert (result.exit_code, record["done"], record["rows"]) == (2, 3, 90)
    assert sorted(record["failed"]) == ["in/bad.parquet", "in/nan.npz"]
    assert record["failed"]["in/bad.parquet"].startswith("is no sound Parquet file")
    assert result.stderr.splitlines()[-1].startswith("igeood: 2 of 5 files failed; fix them and give the command again")
    assert "igeood: in/nan.npz: logits: row 0" in result.stderr
    Path("in/bad.parquet").unlink()
    Path("in/nan.npz").unlink()
    again = run("score", "guard.safetensors", "in", "--out", "out/")
    assert (again.exit_code, "skipped: 3" in again.stdout, "failed" in again.output) == (0, True, False)


def test_what_makes_no_sense_is_one_line(few, monkeypatch):
    os.mkfifo("pipe")
    monkeypatch.setattr(engines, "ANSWER", 2)
    silent, short, closed = (socket.create_server(("127.0.0.1", 0)) for _ in range(3))
    at = [f"127.0.0.1:{server.getsockname()[1]}" for server in (silent, short, closed)]
    closed.close()

    def answer_once():
        with short.accept()[0] as link:
            link.sendall(b"\0")

    Thread(target=answer_once).start()
    ray = ["--engine", "ray", "--address"]
    for words, message in (
        (["in", "--out", "in/"], "out: in/ is in in, which is read|is in in/, and is read"),
        (["in", "--out", "in/scores/"], "out: in/scores/ is in in, which is read"),
        (["in/a.parquet", "in/sub/a.parquet", "--out", "o/"], "in/sub/a.parquet: in/a.parquet has the same name"),
        (["-", "--out", "o/"], "-: a pipe has no file's name"),
        (["pipe", "--out", "o/"], "pipe: a pipe has no file's name"),
        (["in", "--out", "o/", "--model", "x:y"], "out: a guard with a model scores one set of images"),
        (["in", "--out", "o.csv", "--workers", 2], "give --out a folder"),
        (["in", "--out", "o/", "--address", "h:1"], "address: is a Ray cluster's; give --engine ray too"),
        (["in", "--out", "o/", *ray, "here"], "address: 'here' is not HOST:PORT"),
        (["in", "--out", "o/", *ray, at[2]], "no Ray cluster at .*Connection refused"),
        (["in", "--out", "o/", *ray, at[0]], "no Ray cluster at .*timed out"),
        (["in", "--out", "o/", *ray, at[1]], "no Ray cluster at .*no answer in 2 seconds"),
    ):
        result = run("score", "guard.safetensors", *words)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.stderr
        assert re.search(message, result.stderr), result.stderr
    silent.close()
    short.close()
    monkeypatch.setitem(sys.modules, "ray", None)
    missing = run("score", "guard.safetensors", "in", "--out", "o/", "--engine", "ray")
    assert missing.stderr == 'igeood: engine: needs Ray; pip install "igeood[ray]"\n'
    assert not Path("o").exists()


def test_fit_adds_the_files_summaries_in_order_and_goes_on_after_a_failure(few):
    draw = np.random.default_rng(2)
    logits, labels = draw.normal(size=(90, 3)) + 5 * np.eye(3).repeat(30, axis=0), np.arange(3).repeat(30)
    order = draw.permutation(90)
    for i in range(3):
        rows = order[30 * i : 30 * i + 30]
        igeood.write_logits(f"train/{i}.parquet", logits[rows], labels[rows])
    good = Path("train/1.parquet").read_bytes()
    Path("train/1.parquet").write_bytes(b"PAR1")
    fit = ("fit", "train", "--out", "new.safetensors", "--method", "energy")
    failed = run(*fit, "--summary", "sums/", "--json")
    record = json.loads(failed.stdout)
    assert (failed.exit_code, record["done"], list(record["failed"])) == (2, 2, ["train/1.parquet"])
    assert not Path("new.safetensors").exists()
    Path("train/1.parquet").write_bytes(good)
    assert "another method (energy, this one is msp)" in run(*fit[:-1], "msp", "--summary", "sums/").stderr
    assert json.loads(run(*fit, "--summary", "sums/", "--json").stdout)["samples"] == 90
    assert sorted(contents("sums")) == ["0.parquet.safetensors", "1.parquet.safetensors", "2.parquet.safetensors",
                                        "_manifest.json"]  # fmt: skip
    Path("other.safetensors.parts").mkdir()
    Path("other.safetensors.parts/.mine").touch()
    assert run("fit", "train", "--method", "energy", "--out", "other.safetensors", "--workers", "1").exit_code == 0
    assert Path("other.safetensors").read_bytes() == Path("new.safetensors").read_bytes()
    assert [path.name for path in Path("other.safetensors.parts").iterdir()] == [".mine"]
    assert run("merge", "sums", "--method", "energy", "--out", "merged.safetensors").exit_code == 0
    assert Path("merged.safetensors").read_bytes() == Path("new.safetensors").read_bytes()
    scores = [
        igeood.load("new.safetensors").score(logits),
        igeood.black_box(method="energy").fit(logits, labels).score(logits),
    ]
    np.testing.assert_allclose(*scores)


def test_a_unit_whose_workers_die_is_tried_ten_times_and_the_others_are_done():
    class Deadly(engines.Here):
        calls = 0

        def width(self):
            return 3

        def finished(self, handles):
            for handle in handles:
                self.calls += 1
                yield handle, None if handle.args[1] == "poison" else handle()

    engine, seen = Deadly(), []
    units = {name: (name,) for name in ("a", "poison", "b", "c")}
    ends = engines.run(engine, str.upper, units, lambda *report: seen.append(report))
    assert ends == {"a": "A", "b": "B", "c": "C", "poison": engines.DIED}
    assert (engine.calls, seen[-1]) == (3 + engines.TRIES, ("files", 4, 4))


def writers(folder):
    """Processes that have an output open which is not whole yet."""
    for process in Path("/proc").glob("[0-9]*") if any(folder.rglob("*.parquet.part")) else ():
        with contextlib.suppress(OSError):  # it may end, and so may its files
            files = [file.readlink() for file in (process / "fd").iterdir()]
            if any(folder in file.parents and file.name.endswith(".parquet.part") for file in files):
                yield int(process.name)


def kill_one(folder, driver, by=signal.SIGKILL):
    """Kill a process that writes below a folder."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and driver.poll() is None:
        for pid in writers(folder):
            os.kill(pid, by)
            return pid
        time.sleep(0.005)
    driver.kill()
    raise AssertionError(driver.communicate())


def start(made, out, *words):
    command = [*IGEOOD, "score", made / "guard.safetensors", made / "in", "--out", f"{out}/", "--json", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@linux
def test_dead_workers_are_replaced_and_a_dead_driver_leaves_whole_files(made, tmp_path):
    out, whole = tmp_path / "out", contents(made / "whole")
    with start(made, out, "--workers", "2") as driver:
        killed = {kill_one(out, driver), kill_one(out, driver, signal.SIGTERM)}
        while not list(out.rglob("*.parquet")):
            time.sleep(0.01)
        driver.kill()
    assert driver.pid not in killed
    end = time.monotonic() + PATIENCE
    while list(writers(out)) and time.monotonic() < end:
        time.sleep(0.01)  # workers follow it
    there = contents(out)
    assert there.items() <= whole.items()
    with start(made, out, "--workers", "2") as driver:
        record = json.loads(driver.communicate(timeout=PATIENCE)[0])
    assert (driver.returncode, contents(out)) == (0, whole)
    assert (record["skipped"], record["failed"]) == (len(there) - 1, {})


@linux
def test_ctrl_c_stops_workers_and_leaves_whole_files_only(made, tmp_path):
    out = tmp_path / "out"
    with start(made, out, "--workers", "1") as driver:
        while not list(writers(out)):
            time.sleep(0.002)
        driver.send_signal(signal.SIGINT)
        said = driver.communicate(timeout=PATIENCE)[1]
    assert (driver.returncode, said.splitlines()[-1], "Traceback" in said) == (130, "igeood: stopped", False)
    assert contents(out).items() <= contents(made / "whole").items()
    assert not list(out.rglob("*.part"))


CLUSTER = """
import ray, sys
from igeood.scale.engines import Ray
with Ray(workers=2):
    print(ray.get_runtime_context().gcs_address, file=sys.__stdout__, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The address of a Ray cluster with two CPUs."""
    pytest.importorskip("ray", exc_type=ImportError)
    shim = tmp_path_factory.mktemp("shim")
    (shim / "rfc3987_syntax.py").write_text("raise ImportError")  # jsonschema can do without, and it takes seconds
    paths = os.pathsep.join([str(shim), str(Path(igeood.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", paths)
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # of this cluster, for it and for its drivers
        with subprocess.Popen([sys.executable, "-c", CLUSTER], **pipes) as process:
            yield process.stdout.readline().strip()
            process.stdin.close()


@linux
def test_ray_gives_the_same_files_though_a_worker_is_killed(made, tmp_path, cluster):
    out = tmp_path / "out"
    with start(made, out, "--engine", "ray", "--address", cluster) as driver:
        kill_one(out, driver)
        record = json.loads(driver.communicate(timeout=PATIENCE)[0])
    assert (driver.returncode, record["done"], record["rows"], record["failed"]) == (0, 12, 180_000, {})
    assert contents(out) == contents(made / "whole")


@linux
@pytest.mark.slow
def test_ray_goes_on_after_a_driver_was_killed_and_fits_the_same_guard(made, tmp_path, cluster):
    out, whole = tmp_path / "out", contents(made / "whole")
    with start(made, out, "--engine", "ray", "--address", cluster) as driver:
        while not list(out.rglob("*.parquet")):
            time.sleep(0.01)
        driver.kill()
    there = contents(out)
    assert there.items() <= whole.items()
    with start(made, out, "--engine", "ray", "--address", cluster) as driver:
        record = json.loads(driver.communicate(timeout=PATIENCE)[0])
    assert (driver.returncode, record["failed"], contents(out)) == (0, {}, whole)
    assert record["skipped"] >= len(there) - 1
    fit, others = ["fit", made / "in", "--out"], {"here": ["--summary", f"{tmp_path / 'sums'}/"]}
    others["ray"] = ["--engine", "ray", "--address", cluster]
    for name, words in others.items():
        ended = subprocess.run([*IGEOOD, *fit, tmp_path / name, *words], check=False, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "ray").read_bytes() == (tmp_path / "here").read_bytes()
