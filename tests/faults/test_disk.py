"""A disk that is full or read-only, and two processes on one output: what was there stays, and one line says why."""

import ast
import contextlib
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers, which subprocesses run too

from jobs import TEMPORARY, Shop, archive, check_sound, check_units, tree
from kills import TAKES_SPACE, Fault, serving, warm

import igeood
from igeood.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has torch")
MOUNT, UMOUNT = (shutil.which(name) or name for name in ("mount", "umount"))
SOURCE = Path(igeood.__file__).parent
READ_ONLY = ("completion", "data list", "data verify")  # commands that write nothing
LOCKED = ("fit", "calibrate", "tune", "score", "bench", "train", "data get", "demo")  # the second is refused
WHOLE = ("report", "paper", "save")  # one short write: both succeed, and the last one stays
JOBS = (*LOCKED, *WHOLE)
LONG = ("tune", "bench", "train", "report", "paper")


def marked(names, long=LONG):
    """The names as parameters; the long ones among them wait for the long run."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in long)) for name in names]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    (folder / "logs").mkdir()
    with serving(archive()) as served, warm(folder / "logs") as process:
        yield Shop(process, folder, served)


@pytest.fixture(scope="module")
def jobs(shop):
    return shop.jobs()


def leaves(group=main, before=()):
    """Names of all commands, those of groups too."""
    for name, command in group.commands.items():
        inner = isinstance(command, click.Group)
        yield from leaves(command, (*before, name)) if inner else [" ".join((*before, name))]


def test_every_command_is_here():
    assert set(leaves()) == {*JOBS, *READ_ONLY} - {"save"}


@pytest.mark.parametrize("name", READ_ONLY)
def test_other_commands_write_nothing(shop, name):
    folder = shop.folder / f"none-{name}"
    folder.mkdir()
    ended = shop.warm.run([*name.split(), *(["bash"] if name == "completion" else ["--root", "data"])], folder)
    assert (ended.code, ended.calls, tree(folder)) == (0, [], {"./": b""}), ended


# Who writes.

WRITERS = (  # functions that write files, by name; those of a module where the name alone says too little
    "open", "write_text", "write_bytes", "touch", "savefig", "tofile", "savez", "savez_compressed", "dump", "save_file",
    "write_table", "to_parquet", "to_csv", "write_csv", "ParquetWriter", "symlink_to", "hardlink_to", "torch.save",
    "np.save", "shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move", "os.open",
)  # fmt: skip
OWN_WAY = {  # functions that write without `files.whole`, and why they may
    "files.py:_beside": "it is what `whole` writes to",
    "files.py:_sweep": "opened to be locked",
    "files.py:only_one": "a lock, which has no content",
    "benchmark/results.py:append": "grows by whole lines; half a line is dropped when it is read",
    "datasets/download.py:_copy": "has another name until its checksum is right",
    "datasets/download.py:_transfer": "tells what is half-fetched; when it is damaged, that is fetched anew",
    "datasets/unpack.py:_write": "unpacked aside, and moved into place when all of it is there",
    "cli/score.py:write": "to the file that `_sink` got from `whole`",
    "cli/score.py:_csv": "to memory",
    "figures/drawing.py:render": "to memory",
}


def writing_calls(tree_, function=""):
    """Calls that write a file outside of a `with whole(...)`, each with the function that it is in."""
    for node in ast.iter_child_nodes(tree_):
        name = node.name if isinstance(node, ast.FunctionDef) else function
        if isinstance(node, ast.With) and any("whole(" in ast.unparse(item.context_expr) for item in node.items):
            continue
        if isinstance(node, ast.Call) and _writes(node):
            yield name
        yield from writing_calls(node, name)


def _writes(call):
    full = ast.unparse(call.func)
    name = full.rpartition(".")[2]
    if name not in WRITERS and full not in WRITERS:
        return False
    if name == "open":
        given = [*call.args, *(k.value for k in call.keywords if k.arg == "mode")]
        texts = [
            n.value for a in given for n in ast.walk(a) if isinstance(n, ast.Constant) and isinstance(n.value, str)
        ]
        return any(set(text) & set("wax+") and set(text) <= set("rwaxbt+") for text in texts)
    return True


def test_writers_are_found():
    """The search itself: a plain write is found, one within `whole` or a reader is not."""
    code = """
def plain(path):
    path.open("wb")
    path.open(mode="r+b" if path.exists() else "wb")
    path.write_text("x")
    np.save(path, 1)
def whole_file(path):
    with whole(path) as file:
        np.savez(file)
def reader(path):
    path.open("rb")
    open(path)
"""
    assert list(writing_calls(ast.parse(code))) == ["plain"] * 4


def test_every_writer_makes_whole_files_or_has_a_reason():
    """Whatever opens a file to write it, or lets a library do so, stands in a `with whole(...)`."""
    found = {
        f"{path.relative_to(SOURCE).as_posix()}:{name}"
        for path in SOURCE.rglob("*.py")
        for name in writing_calls(ast.parse(path.read_text()))
    }
    assert found == set(OWN_WAY)


# A full disk.


def full_cases():
    for name in JOBS:
        for seed in range(4):
            yield pytest.param(name, seed, marks=[pytest.mark.slow] * (seed > 0 or name in LONG), id=f"{name}-{seed}")


def check_told(ended, *, cure):
    """The user gets one line with the file and the cure."""
    assert ended.code == 2, ended
    told = ended.err.splitlines()[-1]
    assert told.startswith("igeood: "), ended
    assert any(text in told for text in cure), ended
    assert "Traceback" not in ended.err + ended.out, ended
    return told


@pytest.mark.parametrize(("name", "seed"), list(full_cases()))
def test_a_disk_that_fills_up(shop, jobs, name, seed):
    """From some call on nothing can be written: what was there stays, no litter, and later the command ends well."""
    job, draw = jobs[name], random.Random(f"{name} {seed}")
    if name == "demo":  # it takes minutes, and writes as `train`, `bench`, `save` and `report` do
        at = draw.randint(1, 6)
    else:
        ended, whole = shop.whole(job)
        at = draw.choice([i for i, (call, _) in enumerate(ended.calls, start=1) if call in TAKES_SPACE])
    folder = shop.fresh(job)
    failed = shop.run(job, folder, fault=Fault("full", at))
    if name == "save":
        assert (failed.code, "No space left on device: 'saved.safetensors'" in failed.err) == (1, True), failed
    else:
        told = check_told(
            failed, cure=["make room and give the same command again", "free some space and run it again"]
        )
        assert "No space left" in told or "disk is full" in told
        named = told.removeprefix("igeood: ").partition(": ")[0]
        assert (folder / named).resolve().is_relative_to(folder.resolve()), told
        assert named not in ("", "."), told
        assert not TEMPORARY.search(named), told
    left = tree(folder)
    assert not [path for path in left if TEMPORARY.search(path)]
    assert {path: left[path] for path in shop.before(job)} == shop.before(job)
    if name != "demo":
        check_sound(shop, job, folder)
        again = shop.run(job, folder)
        assert again.code == 0, again
        assert tree(folder) == whole | ({} if name != "data get" else _kept(folder, shop))
        check_units(job, ended, [failed, again], kills=1)


def _kept(folder, shop):
    """An archive that was fetched before the disk was full stays: it may as well be the user's."""
    path = folder / "data" / "small.tar.gz"
    return {"data/small.tar.gz": shop.served.content} if path.exists() else {}


@contextlib.contextmanager
def mounted(folder, *options):
    """A file system of its own in a folder; skips where that is not allowed."""
    done = subprocess.run([MOUNT, "-t", "tmpfs", *options, "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no mount: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run([UMOUNT, folder], check=True)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting is for root")
@pytest.mark.parametrize("name", ["fit", "calibrate", "tune", "score", "data get"])
def test_a_disk_that_is_really_full(shop, jobs, name, tmp_path):
    job = jobs[name]
    _, whole = shop.whole(job)
    with mounted(tmp_path, "-o", "size=4m"):
        shop.fill(job, tmp_path)
        before = tree(tmp_path)
        with (tmp_path / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        failed = shop.run(job, tmp_path)
        check_told(failed, cure=["make room and give the same command again", "free some space and run it again"])
        (tmp_path / "filler").unlink()
        assert {path: found for path, found in tree(tmp_path).items() if found} == {
            k: v for k, v in before.items() if v
        }
        again = shop.run(job, tmp_path)
        assert again.code == 0, again
        assert tree(tmp_path) == whole


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting is for root")
@pytest.mark.parametrize("name", marked([name for name in JOBS if name != "save"], ("report", "paper")))
def test_a_read_only_target(shop, jobs, name, tmp_path):
    job = jobs[name]
    with mounted(tmp_path):
        shop.fill(job, tmp_path)
        before = tree(tmp_path)
        subprocess.run([MOUNT, "-o", "remount,ro", tmp_path], check=True)
        failed = shop.run(job, tmp_path)
        told = check_told(failed, cure=["name a place that you may write to", "choose another folder with IGEOOD_DATA"])
        assert "Read-only file system" in told
        assert tree(tmp_path) == before


# Two processes.


def first_call(ended, *names):
    return next(i for i, (call, _) in enumerate(ended.calls, start=1) if call in names)


@pytest.mark.parametrize("name", marked(LOCKED, ("tune", "train")))
def test_the_second_process_is_refused(shop, jobs, name):
    """While one is at work a second gets an error and changes nothing; when the first is killed, its lock is gone."""
    job = jobs[name]
    folder = shop.fresh(job)
    web = [shop.served.url, len(shop.served.content)] if job.fetches else None
    at = 3 if name == "demo" else first_call(shop.whole(job)[0], "write")  # in any case after its lock
    with shop.warm.stalled(job.command, folder, at, web=web):
        before = tree(folder)
        second = shop.run(job, folder)
        told = check_told(second, cure=["wait for it, or stop it"])
        assert "another process is writing there" in told
        assert tree(folder) == before
    if name != "demo":
        third = shop.run(job, folder)
        assert third.code == 0, third
        assert tree(folder) == shop.whole(job)[1]


@pytest.mark.parametrize("name", marked(WHOLE))
def test_two_writers_of_one_file_never_mix(shop, jobs, name):
    """One has half-written its file: the other ends well and leaves that alone, and it goes when its writer is dead."""
    job = jobs[name]
    ended, whole = shop.whole(job)
    folder = shop.fresh(job)
    with shop.warm.stalled(job.command, folder, first_call(ended, "write")):
        [temporary] = [path for path in tree(folder) if TEMPORARY.search(path)]
        second = shop.run(job, folder)
        assert second.code == 0, second
        found = tree(folder)
        assert found.pop(temporary)
        assert found == whole
    third = shop.run(job, folder)
    assert third.code == 0, third
    assert tree(folder) == whole
