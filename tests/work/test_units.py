"""Many files: one output for each input, the same from every engine, whoever dies meanwhile."""

import contextlib
import json
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, Future
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import igeood
from igeood.errors import InputError, MissingExtraError
from igeood.files import record_head
from igeood.work import engines
from igeood.work.scoring import score_file
from igeood.work.units import MANIFEST, do_units, find_units

IGEOOD = [sys.executable, "-c", "from igeood.cli import main; main()"]
COLUMNS = {"logits": None, "label": None, "identity": None}
PATIENCE = 240  # seconds, on a busy machine
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


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
    outcomes = score(folder / "guard.safetensors", [folder / "in"], folder / "whole")
    assert [outcome["rows"] for outcome in outcomes.values()] == [15_000] * 12
    return folder


@pytest.fixture
def few(tmp_path, monkeypatch):
    """A folder of small files of several kinds as the current folder."""
    monkeypatch.chdir(tmp_path)
    logits = np.random.default_rng(1).normal(size=(30, 10)).astype(np.float32)
    for name in ("in/a.parquet", "in/b.npz", "in/sub/a.parquet"):
        igeood.write_logits(name, logits + len(name))
    return tmp_path


def score(guard, names, out, *, engine=engines.here, force=False, **recipe):
    """Score each file, as `igeood score` does."""
    fingerprint, units = record_head(guard)["sha256"], find_units([*map(str, names)], str(out))
    work = partial(score_file, str(guard), fingerprint, COLUMNS, None)
    make = partial(engine, work)
    return do_units(units, str(out), {"guard": fingerprint, **recipe}, make, lambda *_: None, force=force)


def contents(folder):
    """The files of a folder but for leftovers of the dead, which nobody reads."""
    files = [path for path in Path(folder).rglob("*") if path.is_file() and path.name[0] != "."]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name != MANIFEST}


def test_each_output_is_what_scoring_that_file_alone_writes(made, few):
    Path("text").mkdir()
    lines = [[f"logit_{c}" for c in range(10)], *np.eye(10).tolist()]
    Path("text/u.csv").write_text("".join(f"{','.join(map(str, line))}\n" for line in lines))
    pq.write_table(pa.table({"logits": pa.array([], pa.list_(pa.float32()))}), "text/none.parquet")
    outcomes = score(made / "guard.safetensors", ["in", "text/*"], "out")
    assert sum(outcome["rows"] for outcome in outcomes.values()) == 100
    sources = {"a.parquet": "in/a.parquet", "b.npz.parquet": "in/b.npz", "none.parquet": "text/none.parquet"}
    assert set(contents("out")) == {*sources, "sub/a.parquet", "u.csv"}
    for output, source in sources.items():
        score(made / "guard.safetensors", [source], "alone")
        assert Path("alone", Path(output).name).read_bytes() == Path("out", output).read_bytes()
    schemas = [pq.read_table(f"out/{name}").drop(["id"]).schema for name in ("none.parquet", "a.parquet")]
    assert schemas[0] == schemas[1]
    verdict = igeood.load(made / "guard.safetensors").predict(np.eye(10))
    assert pyarrow.csv.read_csv("out/u.csv")["score"].to_pylist() == verdict.score.tolist()


def test_what_is_there_is_left_unless_its_input_changed_or_force_is_given(made, few):
    done = partial(score, made / "guard.safetensors", out="out")
    assert [len(done(["in"])), len(done(["in"]))] == [3, 0]
    Path("out/sub/a.parquet").unlink()
    assert list(done(["in"])) == ["sub/a.parquet"]
    igeood.write_logits("in/a.parquet", np.eye(10) * 5)
    igeood.write_logits("in/new.parquet", np.eye(10) * 5)
    assert set(done(["in"])) == {"a.parquet", "new.parquet"}
    igeood.write_logits("other/a.parquet", np.eye(10) * 5)
    before = contents("out")
    for names, options in ((["in"], {"recipe": 2}), (["other"], {})):  # another recipe; another input
        with pytest.raises(InputError) as caught:
            done(names, **options)
        assert (caught.value.argument, contents("out")) == ("out", before)
    Path("out/a.parquet").write_bytes(b"stray")
    assert len(done(["in/a.parquet"], force=True)) == 1
    assert contents("out") == before
    Path("in/new.parquet").unlink()
    assert len(done(["in"], force=True, recipe=2)) == 3
    assert "new.parquet" not in contents("out")
    igeood.write_logits("in/mine.parquet", np.eye(10) * 5)
    Path("out/mine.parquet").write_bytes(b"mine")
    with pytest.raises(InputError):
        done(["in"], recipe=2)
    assert Path("out/mine.parquet").read_bytes() == b"mine"


@pytest.mark.parametrize("damage", [{"units": {"../guard": [0, 0, 0]}}, {"schema": 0}, {"units": 3}, None])
def test_a_foreign_or_damaged_manifest_is_refused_even_by_force(made, few, damage, refused):
    score(made / "guard.safetensors", ["in"], "out")
    manifest = Path("out", MANIFEST)
    manifest.write_text("{" if damage is None else json.dumps({**json.loads(manifest.read_text()), **damage}))
    with refused("out"):
        score(made / "guard.safetensors", ["in"], "out", force=True)


def test_a_file_that_fails_does_not_stop_the_others(made, few):
    Path("in/bad.parquet").write_bytes(b"PAR1 half")
    np.savez("in/nan.npz", logits=np.full((1, 10), np.nan))  # a bad row is an error where it is the only one
    bad = {"bad.parquet", "nan.npz.parquet"}
    for _ in range(2):  # the others are there, the second time
        outcomes = score(made / "bare.safetensors", ["in"], "out")
        assert {unit for unit, outcome in outcomes.items() if isinstance(outcome, InputError)} == bad
        assert set(contents("out")) == {"a.parquet", "b.npz.parquet", "sub/a.parquet"}


def test_folders_and_engines_that_make_no_sense(few, monkeypatch):
    for names, out in ((["in"], "in"), (["in"], "in/scores"), (["in/a.parquet", "in/sub/a.parquet"], "o")):
        with pytest.raises(InputError):
            find_units(names, out)
    with pytest.raises(InputError):
        engines.choose(None, None, "h:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError):
        engines.choose("ray", None, None)


def test_a_unit_whose_workers_die_is_tried_ten_times_and_the_others_are_done(monkeypatch):
    class Pool:
        calls = 0

        def submit(self, call, work, name):
            future = Future()
            Pool.calls += 1
            if name == "poison":
                future.set_exception(BrokenExecutor())
            else:
                future.set_result(call(work, name))
            return future

        def shutdown(self, **_):
            pass

    monkeypatch.setattr(engines, "_pool", Pool)
    ends = dict(engines.in_processes(2, str.upper, {name: (name,) for name in ("poison", "a", "b", "c")}))
    assert isinstance(ends.pop("poison"), InputError)
    assert (ends, Pool.calls) == ({"a": "A", "b": "B", "c": "C"}, 3 + engines.TRIES)


def test_who_stops_early_ends_its_own_workers_only():
    bystander = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(PATIENCE,))
    bystander.start()
    results = engines.in_processes(1, time.sleep, {"short": (0,), "long": (PATIENCE,)})
    assert next(results) == ("short", None)
    results.close()
    assert multiprocessing.active_children() == [bystander]
    bystander.terminate()
    bystander.join()


def writers(folder):
    """Processes that have an output open which is not whole yet."""
    for process in Path("/proc").glob("[0-9]*") if any(folder.rglob("*.parquet.part")) else ():
        with contextlib.suppress(OSError):  # it may end, and so may its files
            files = [file.readlink() for file in (process / "fd").iterdir()]
            if any(folder in file.parents and file.name.endswith(".parquet.part") for file in files):
                yield int(process.name)


def signal_one(folder, driver, by):
    """Send a signal to a process that writes below a folder."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and driver.poll() is None:
        for pid in writers(folder):
            os.kill(pid, by)
            return
        time.sleep(0.005)
    driver.kill()
    raise AssertionError(driver.communicate())


def start(made, out, *words):
    command = [*IGEOOD, "score", made / "guard.safetensors", made / "in", "--out", f"{out}/", "--json", *words]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for_a_file(out):
    while not list(out.rglob("*.parquet")):
        time.sleep(0.01)


@linux
def test_dead_workers_are_replaced_and_a_dead_driver_leaves_whole_files(made, tmp_path):
    out, whole = tmp_path / "out", contents(made / "whole")
    with start(made, out, "--workers", "2") as driver:
        signal_one(out, driver, signal.SIGKILL)
        signal_one(out, driver, signal.SIGTERM)
        wait_for_a_file(out)
        driver.kill()
    end = time.monotonic() + PATIENCE
    while list(writers(out)) and time.monotonic() < end:
        time.sleep(0.01)  # workers follow it
    there = contents(out)
    assert there.items() <= whole.items()
    with start(made, out, "--workers", "2") as driver:
        record = json.loads(driver.communicate(timeout=PATIENCE)[0])
    assert (driver.returncode, contents(out)) == (0, whole)
    assert (record["skipped"], record["failed"]) == (len(there), {})


@linux
def test_ctrl_c_stops_workers_and_leaves_whole_files_only(made, tmp_path):
    out = tmp_path / "out"
    with start(made, out, "--workers", "1") as driver:
        while not list(writers(out)):
            time.sleep(0.002)
        driver.send_signal(signal.SIGINT)
        said = driver.communicate(timeout=PATIENCE)[1]
    assert (driver.returncode, "Traceback" in said) == (130, False)
    assert contents(out).items() <= contents(made / "whole").items()
    assert not list(out.rglob("*.part"))


CLUSTER = """
import ray, sys
ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, logging_level="ERROR")
print(ray.get_runtime_context().gcs_address, flush=True)
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
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # of this cluster, for it and for its drivers
        with subprocess.Popen([sys.executable, "-c", CLUSTER], **pipes) as process:
            yield process.stdout.readline().strip()
            process.stdin.close()


@linux
def test_ray_gives_the_same_files_though_a_worker_and_then_the_driver_are_killed(made, tmp_path, cluster):
    out, whole = tmp_path / "out", contents(made / "whole")
    ray = ["--engine", "ray", "--address", cluster]
    with start(made, out, *ray) as driver:
        signal_one(out, driver, signal.SIGKILL)
        wait_for_a_file(out)
        driver.kill()
    assert contents(out).items() <= whole.items()
    with start(made, out, *ray) as driver:
        record = json.loads(driver.communicate(timeout=PATIENCE)[0])
    assert (driver.returncode, record["failed"], contents(out)) == (0, {}, whole)
