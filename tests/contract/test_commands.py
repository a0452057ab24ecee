"""Every command, with each of its parameters spoilt: it ends well, or with one clear line and nothing touched."""

import errno
import inspect
import json
import logging
import os
import pickle
import random
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from calls import (
    COMMANDS,
    Place,
    as_nobody,
    call,
    contents,
    good,
    may_write,
    no_traceback,
    open_folder,
    refused,
    went_well,
)
from click.testing import CliRunner

import igeood
from igeood import datasets, demo
from igeood.benchmark import Results
from igeood.cli import main
from igeood.cli.progress import progress_bars
from igeood.files import only_one
from igeood.paper import reported
from igeood.report import Report
from igeood.report.promise import promises

NETS = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
"""
FOREIGN = b"somebody's own notes\n" * 20


def ids(words):
    return " ".join(words)


@pytest.fixture(scope="module")
def made(make_known_, world, tmp_path_factory):
    """Good files of every kind, and bad ones of many: what the calls are made with."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(world, folder, dirs_exist_ok=True)
    known = make_known_(n_classes=4, n=80)
    for name in ("train", "held_out", "test", "ood"):
        igeood.write_logits(folder / f"{name}.npz", getattr(known, name))
    guard = igeood.black_box(method="energy").fit(known.train.logits, known.train.labels)
    guard.save(folder / "fitted.safetensors")
    guard.calibrate(known.held_out.logits).save(folder / "guard.safetensors")
    (folder / "nets.py").write_text(NETS)
    for i, path in enumerate(sorted((folder / "red").iterdir())[:8]):
        (folder / "kinds" / "abcd"[i % 4]).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / "kinds" / "abcd"[i % 4])
    shutil.rmtree(folder / "blue")
    spoil(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        called = call(good(("bench",), out="results"), folder)
    assert called.code == 0, called.result.output
    return folder


def spoil(folder):
    """Files that are not what anybody wants."""
    whole = (folder / "test.npz").read_bytes()
    (folder / "empty").write_bytes(b"")
    (folder / "text").write_bytes(FOREIGN)
    (folder / "text.npz").write_bytes(FOREIGN)
    (folder / "text.safetensors").write_bytes(FOREIGN)
    (folder / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "cut.safetensors").write_bytes((folder / "guard.safetensors").read_bytes()[:-9])
    (folder / "pickle.npz").write_bytes(pickle.dumps({"logits": np.zeros((3, 4))}))
    np.savez(folder / "objects.npz", logits=np.array([{"a": 1}, None]), labels=np.zeros(2, int))
    (folder / "folder").mkdir()


@pytest.fixture(scope="module")
def place(made, tmp_path_factory):
    return Place(made, tmp_path_factory.mktemp("place") / "here")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A demonstration that was run once, with few images and an easy guard."""
    load, folder = datasets.load, tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"EPOCHS": 1, "IMAGES": 60, "METHODS": ("msp",), "SETTINGS": ("black-box",)}.items():
            patched.setattr(demo, name, value)
        patched.setattr(demo.datasets, "load", lambda name, **options: load(name, **{"limit": 150, **options}))
        patched.setattr(demo, "white_box", lambda model, **_: igeood.black_box(model, method="energy"))
        return demo.run(folder)


@pytest.fixture
def files(request, place, monkeypatch):
    """A copy of them as the current folder; the demonstration, where it is asked for, is the one that was run."""
    monkeypatch.chdir(place.tidy())
    if request.node.callspec.params.get("words") == ("demo",):
        shown = request.getfixturevalue("shown")

        def run(target, seed, say):
            say("guarding", seed, seed + 1)
            with only_one(target / ".lock", "out"):
                shutil.copytree(shown.folder, target, dirs_exist_ok=True)
            return replace(shown, folder=target, results=Results(target))

        monkeypatch.setattr(demo, "_run", run)
        monkeypatch.setattr("igeood.report.make", lambda *_, **__: Report("<!doctype html>", {}))  # that has its own
    return place.folder


@pytest.mark.parametrize("words", COMMANDS, ids=ids)
def test_a_call_that_is_right_works(words, files):
    arguments = good(words)
    called = call(arguments, files)
    assert called.code == 0, called.result.output
    went_well(called, words, arguments)


# ---- what a parameter may be given, by what it takes

PLACES = [
    "none.npz", "none/none.npz", "folder", "/proc", "empty", "text.npz", "text.safetensors", "cut.npz",
    "cut.safetensors", "pickle.npz", "objects.npz", "net.safetensors", "results", "/dev/null",
]  # fmt: skip
NAMES = ["", " ", "two\nlines", "sp ace ünïcödé", "-x", "a" * 300, "\udcff", "%s{}[/]", "~nobody-here/x"]
SETS = ["folder:none", "folder:folder", "idx:none", "idx:text.npz", "demo:none", "cifar-1", "CIFAR-10"]
WHOLE = ["x", "", "1.5", "nan", "-1", "0", "9" * 30]
REAL = ["x", "", "nan", "inf", "-inf", "-1", "0", "1e308", "1e-320", "1e999"]
NEVER = {"x", "", "nan", "inf", "-inf", "1e999", "-1"}  # no number of ours may be one of these
READS_SETS = ("ood", "validation", "data", "train", "id_data", "in_distribution")
# What else a call needs for a parameter to matter.
IMAGES = {"model": "nets:make", "train": "folder:kinds", "size": "16"}
NEEDS = {
    "weights": {"model": "nets:make"},
    "fit.weights": IMAGES,
    "fit.batch": IMAGES,
    "fit.size": IMAGES,
    "fit.mean": {**IMAGES, "std": "1"},
    "fit.std": {**IMAGES, "mean": "0"},
}


def spoilt(param):
    """Values to try for a parameter."""
    if getattr(param, "is_flag", False):
        return []
    if isinstance(param.type, click.Choice):
        first = str(param.type.choices[0])
        return ["", "zzz", f"{first}x", first.upper(), first[:-1], "two\nlines"]
    if isinstance(param.type, click.types.IntParamType):
        return WHOLE
    if isinstance(param.type, click.types.FloatParamType):
        return REAL
    if param.name in ("mean", "std"):
        return [*REAL[:6], "1,2", "nan,nan,nan", "1,,2", "1e308,1,1", "two\nlines"]
    return [*NAMES, *(PLACES if isinstance(param.type, click.Path) else []), *(SETS * (param.name in READS_SETS))]


CASES = [
    pytest.param(words, param.name, value, id=f"{ids(words)} {param.name} {value!r:.40}")
    for words, command in COMMANDS.items()
    for param in command.params
    for value in spoilt(param)
]


@pytest.mark.parametrize(("words", "name", "value"), CASES)
def test_a_spoilt_parameter(words, name, value, files):
    needed = NEEDS.get(f"{ids(words)}.{name}", NEEDS.get(name, {}))
    known = {param.name: param for param in COMMANDS[words].params}
    arguments = good(words, **{**{need: needed[need] for need in needed if need in known}, name: value})
    called = call(arguments, files)
    param = known[name]
    if called.code == 0:
        went_well(called, words, arguments)
        number = isinstance(param.type, click.types.IntParamType | click.types.FloatParamType)
        assert not (value in NEVER and (number or name in ("mean", "std")) and (name, value) != ("mean", "-1"))
    else:
        given = [value.replace("\n", "\\n"), repr(value)[1:-1], repr(value), str(Path(value)), value.partition(":")[2]]
        given += [str(parent) for parent in Path(value).parents if str(parent) != "."]
        refused(called, *given, *param.opts, name, (param.metavar or name).upper())


# ---- what goes wrong outside

SOURCE = str(Path(igeood.__file__).parent)
POINTS, MANY = 2, 25  # of each command, where each of these happens
ERRORS = {
    "Ctrl-C": KeyboardInterrupt(),
    "no memory": MemoryError(),
    "broken disk": OSError(errno.EIO, "Input/output error"),
    "full disk": OSError(errno.ENOSPC, "No space left on device"),
}
RESUMED = ("bench", "train", "demo")  # what these have finished stays


class Failing:
    """Raises an error at the n-th call of a function of the library; counts the calls if there is no such n."""

    def __init__(self, at=0, error=None):
        self.at, self.error, self.calls = at, error, 0

    def __call__(self, frame, event, _):
        code = frame.f_code
        ours = code.co_filename.startswith(SOURCE) and not code.co_filename.endswith("cli/__init__.py")
        if event != "call" or not ours or code.co_name == "<module>" or code.co_flags & inspect.CO_GENERATOR:
            return  # a generator would be left where it is, as no real error leaves it
        self.calls += 1
        if self.calls == self.at:
            raise self.error

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


@pytest.fixture(scope="module")
def unbroken():
    """By command: what an unbroken call gave, the files that it made, and how often it called the library."""
    return {}


def counted(arguments, place):
    right = call(arguments, place.folder)  # all that is imported later is there now
    made = (place.folder / name for name in right.changed)
    whole = {str(path.relative_to(place.folder)): path.read_bytes() for path in made if path.is_file()}
    os.chdir(place.tidy())
    with Failing() as counting:
        assert call(arguments, place.folder).result.stdout == right.result.stdout
    return right, whole, counting.calls


@pytest.mark.parametrize("points", [POINTS, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ERRORS)
@pytest.mark.parametrize("words", COMMANDS, ids=ids)
def test_an_error_in_the_middle(words, what, points, place, files, unbroken):
    arguments = good(words)
    right, whole, calls = unbroken.get(words) or unbroken.setdefault(words, counted(arguments, place))
    draw = random.Random(f"{words} {what}")
    before = (torch.get_num_threads(), list(logging.getLogger("igeood").handlers), os.environ.copy())
    for at in sorted(draw.randint(1, calls) for _ in range(points)):
        os.chdir(place.tidy())
        with Failing(at, ERRORS[what]) as failing:
            called = call(arguments, files)
        assert failing.calls >= at
        no_traceback(called)
        if called.code == 0:  # it could do without
            assert called.result.stdout == right.result.stdout
        elif what == "Ctrl-C":
            assert (called.code, called.line.startswith("igeood: stopped")) == (130, True)
        else:
            assert (called.code, called.line.startswith("igeood: ")) == (2, True), called.result.output
        assert not [name for name in contents(files) if name.endswith(".part")]
        if words[0] not in RESUMED:
            left = {name: (files / name).read_bytes() for name in called.changed if (files / name).is_file()}
            assert left.items() <= whole.items(), "something else than the whole result was left"
    assert (torch.get_num_threads(), list(logging.getLogger("igeood").handlers), os.environ.copy()) == before


@pytest.mark.parametrize("words", COMMANDS, ids=ids)
def test_files_that_may_not_be_read(words, made, monkeypatch):
    arguments = good(words)
    with open_folder() as folder:
        shutil.copytree(made, folder, dirs_exist_ok=True)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o777)
        monkeypatch.chdir(folder)
        assert words == ("demo",) or call(arguments, folder).code == 0  # all that is imported later is there now
        if words == ("fit",):  # which writes over nothing
            Path("new.safetensors").unlink()
        for value in [word.split("=")[-1].removeprefix("folder:") for word in arguments[len(words) :]]:
            path = folder / value
            if not value or value == may_write(words, arguments) or not path.exists():
                continue
            path.chmod(0)
            with as_nobody():
                called = call(arguments, folder)
            path.chmod(0o777)
            assert value in refused(called)


@pytest.mark.parametrize("words", COMMANDS, ids=ids)
def test_help_on_a_narrow_screen(words):
    for columns in ("20", "1", "0", "x"):
        found = CliRunner(env={"COLUMNS": columns}).invoke(main, [*words, "--help"], terminal_width=20)
        assert (found.exit_code, found.stderr) == (0, "")
        assert all(param.opts[0] in found.stdout for param in COMMANDS[words].params if isinstance(param, click.Option))


# ---- the program itself, as a shell starts it

IGEOOD = shlex.quote(str(Path(sys.executable).parent / "igeood"))
PLAIN = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "HOME": "/nonexistent"}
SHELL = {
    "no home, no locale": (f"{IGEOOD} data list --json", {}, 0, ""),
    "ASCII only": (f"{IGEOOD} score guard.safetensors 'ünï cödé.npz'", ASCII, 2, "there is no such file"),
    "20 columns": (f"{IGEOOD} data list", {"COLUMNS": "20"}, 0, "Data sets in"),
    "stdout closed": (f"{IGEOOD} data list >&-", {}, 0, "Data sets in"),
    "verdicts to a closed stdout": (f"{IGEOOD} score guard.safetensors test.npz >&-", {}, 2, "stdout: is closed; name"),
    "stderr closed": (f"{IGEOOD} score guard.safetensors none.npz 2>&-", {}, 2, ""),
    "stdin closed": (f"{IGEOOD} score guard.safetensors test.npz <&- | wc -l | grep -qx 81", {}, 0, "refused"),
    "a full device": (f"{IGEOOD} data list --json > /dev/full", {}, 2, "No space left on device; make room"),
    "a reader that leaves": (
        f"{IGEOOD} score guard.safetensors many.npz | head -1; exit ${{PIPESTATUS[0]}}",
        {},
        1,
        "",
    ),
    "arguments swapped": (
        f"{IGEOOD} score test.npz guard.safetensors",
        {},
        2,
        "give the guard first, then the samples",
    ),
    "no arguments": (f"{IGEOOD} score", {}, 2, "see `igeood score --help`"),
    "a stray option": (f"{IGEOOD} fit -x train.npz --out=o", {}, 2, "see `igeood fit --help`"),
}


@pytest.mark.parametrize("what", SHELL)
def test_the_program(what, made, tmp_path):
    line, environment, code, message = SHELL[what]
    for name in ("guard.safetensors", "test.npz", "train.npz"):
        shutil.copy(made / name, tmp_path)
    np.savez(tmp_path / "many.npz", logits=np.zeros((60_000, 4)))
    before = contents(tmp_path)
    found = subprocess.run(
        [shutil.which("bash"), "-c", line],
        cwd=tmp_path,
        env={**PLAIN, **environment},
        capture_output=True,
        check=False,
        timeout=300,
    )
    told = found.stderr.decode()
    assert found.returncode == code, told
    assert "Traceback" not in told
    assert "Exception ignored" not in told
    assert message in told
    assert contents(tmp_path) == before


# ---- what commands must not hide


def test_swapped_arguments_are_told(place, monkeypatch):
    monkeypatch.chdir(place.tidy())
    for start in (["score"], ["calibrate"]):
        called = call([*start, "test.npz", "guard.safetensors"], place.folder)
        told = refused(called, "guard")
        assert told == "guard: test.npz is none, but guard.safetensors is: give the guard first, then the samples"
    assert "guard.safetensors is: give" not in call(["score", "test.npz", "train.npz"], place.folder).line


def test_calibrating_on_training_samples_promises_nothing(place, monkeypatch):
    """Neither now, nor from the file, nor in a report."""
    monkeypatch.chdir(place.tidy())
    called = call(["calibrate", "fitted.safetensors", "train.npz", "--json"], place.folder)
    told = json.loads(called.result.stdout)
    assert told["promise"] is None
    assert told["warning"] == "nothing is promised: of 80 calibration samples 80 were trained on"
    assert "80 of 80 samples are training samples" in called.result.stderr
    assert igeood.load("fitted.safetensors").promise == told["warning"]
    assert promises(Path("fitted.safetensors"), [], 0.95)[0].endswith(f"{told['warning']}.")
    right = json.loads(call(["calibrate", "fitted.safetensors", "held_out.npz", "--json"], place.folder).result.stdout)
    assert right["promise"].startswith("at least 95%")
    assert "warning" not in right


def test_what_tune_used_is_told(place, monkeypatch, caplog):
    monkeypatch.chdir(place.tidy())
    assert call(good(("tune",)), place.folder).code == 0
    called = call(["calibrate", "fitted.safetensors", "held_out.npz"], place.folder)
    assert "calibrate: left out " in called.result.stderr
    assert [record.levelname for record in caplog.records if "left out" in record.getMessage()] == ["WARNING"]


MODULES = {
    "lacks": ("import os\nimport no_such_thing\n", "ModuleNotFoundError: No module named 'no_such_thing'", 2),
    "typo": ("x = 1\ndef make(:\n", "SyntaxError: invalid syntax", 2),
    "fails": ("import math\n\n\nvalue = math.sqrt(-1)\n", "ValueError: math domain error", 4),
    "deep": ("import torch\ndef make():\n    return torch.nn.Linear(3, 3)(torch.zeros(2))\n", "RuntimeError: ", 3),
}


@pytest.mark.parametrize("name", MODULES)
def test_an_error_in_a_models_module_is_told_with_file_and_line(name, place, monkeypatch):
    monkeypatch.chdir(place.tidy())
    monkeypatch.setattr(sys, "path", list(sys.path))
    content, reason, line = MODULES[name]
    Path(f"{name}.py").write_text(content)
    options = ["--out=new.safetensors", "--size=16", f"--model={name}:make"]
    told = refused(call(["fit", "folder:kinds", *options], place.folder), name)
    assert reason in told
    assert f"({place.folder / name}.py, line {line}); mend it there" in told


def test_a_misspelt_field_of_the_papers_numbers():
    with pytest.raises(igeood.errors.InputError) as error:
        reported.find(methode="igeood")
    assert "no 'methode'; did you mean 'method'? there are label, " in str(error.value)


def test_progress_is_told_again_after_a_while(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("igeood.cli.progress.time.monotonic", lambda: now[0])

    @click.command()
    def work():
        with progress_bars() as report:
            for done in range(1, 50):
                now[0] += 24
                report("temperatures", done, 49)

    said = [int(line.split()[1]) for line in CliRunner().invoke(work).stderr.splitlines()]
    assert {13, 25, 37, 49} <= set(said)
    assert max(np.diff([0, *said])) <= 3
