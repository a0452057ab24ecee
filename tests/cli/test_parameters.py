"""Every parameter of every command, found in click's own tree, with a wrong value: one line, nothing touched."""

import re
import shutil

import click
import pytest

from igeood.cli import main

GROUP = main.get_command(None, "data")
COMMANDS = {name: main.get_command(None, name) for name in main.list_commands(None) if name != "data"}
COMMANDS |= {f"data {name}": command for name, command in GROUP.commands.items()}
# A call of each command that works, in the folder of the fixture `place`.
GOOD = {
    "fit": {"train": "train.npz", "out": "new.safetensors"},
    "merge": {"summaries": "train.summary", "out": "new.safetensors"},
    "tune": {"guard": "fitted.safetensors", "train": "train.npz", "id_data": "held_out.npz", "ood": "ood.npz"},
    "calibrate": {"guard": "fitted.safetensors", "id_data": "held_out.npz"},
    "score": {"guard": "guard.safetensors", "data": "test.npz"},
    "monitor": {"guard": "guard.safetensors", "verdicts": "verdicts.csv"},
    "serve": {"guard": "guard.safetensors", "port": "0"},
    "export": {"guard": "guard.safetensors", "out": "new.onnx"},
    "bench": {"networks": "net.safetensors", "ood": "folder:red", "settings": "black-box", "methods": "msp",
              "images": "40", "out": "results"},
    "paper": {"name": "accuracy", "results": "results"},
    "report": {"results": "results"},
    "train": {"network": "resnet-10-16", "out": "new.safetensors", "epochs": "1", "limit": "20", "batch": "10"},
    "data get": {"names": "gaussian"},
    "data list": {},
    "demo": {},
}  # fmt: skip
# A wrong value for each parameter, by command and name, by name, or by type; None where any value is right.
BAD = {
    "train": "none.npz", "guard": "none.safetensors", "id_data": "none.npz", "ood": "none.npz", "data": "none.npz",
    "out": "train.npz/new.safetensors", "method": "magic", "methods": "magic", "settings": "magic", "layers": "nope",
    "mean": "a", "std": "0", "logits_column": "nope", "label_column": "nope", "id_column": "nope", "model": "nope",
    "weights": "none.pt", "root": "train.npz", "networks": "none.safetensors", "in_distribution": "cifar-1",
    "validation": "nope", "results": "none", "name": "table-9", "network": "resnet", "names": "cifar-1",
    "bench.out": "train.npz", "demo.out": "train.npz", "paper.out": "train.npz", "train.data": "cifar-1",
    "train.out": "new.txt", "bench.ood": "folder:none", "paper.networks": "none.safetensors",
    "summary": "train.npz/new", "summaries": "none", "budget": "lots", "address": "nope", "classes": "none.txt",
    "options": "magic", "tune.summary": "none", "calibrate.label_column": None, "score.label_column": None,
    "verdicts": "none.csv", "state": "train.npz", "picture": "train.npz", "host": "192.0.2.1", "serve.name": "a/b",
    "key_file": "none.txt", "max_body": "lots", "max_delay": "soon", "keep_flagged": "train.npz",
    "example": "none.npz", "export.label_column": None, "export.id_column": None, "export.logits_column": None,
}  # fmt: skip


def wrong(command, param):
    """The wrong value of a parameter."""
    kinds = {click.Choice: "zzz", click.types.IntParamType: "-1", click.types.FloatParamType: "nan"}
    by_name = BAD.get(f"{command}.{param.name}", BAD.get(param.name, "no wrong value is known"))
    return next((value for kind, value in kinds.items() if isinstance(param.type, kind)), by_name)


CASES = [
    pytest.param(command, param.name, wrong(command, param), id=f"{command} {param.name}")
    for command, found in COMMANDS.items()
    for param in found.params
    if not getattr(param, "is_flag", False) and wrong(command, param) is not None
]


def call(command, **changes):
    """The arguments of a call with some values changed."""
    values = {**GOOD[command], **changes}
    given = [(param, values[param.name]) for param in COMMANDS[command].params if param.name in values]
    options = [f"{param.opts[0]}={value}" for param, value in given if isinstance(param, click.Option)]
    return [*command.split(), *options, "--", *(value for param, value in given if isinstance(param, click.Argument))]


@pytest.fixture(scope="module")
def place(made, laboratory, tmp_path_factory):
    """What a call of any command needs."""
    folder = tmp_path_factory.mktemp("place")
    for source in (made, laboratory):
        shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder


def contents(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("command", "name", "value"), CASES)
def test_a_wrong_value_is_one_line_and_touches_nothing(run, place, monkeypatch, command, name, value):
    monkeypatch.chdir(place)
    before = contents(place)
    result = run(*call(command, **{name: value}), root=place)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    *messages, line = result.stderr.splitlines()
    assert [text.startswith("igeood: ") for text in (*messages, line)] == [False] * len(messages) + [True]
    option = next(param.opts[0] for param in COMMANDS[command].params if param.name == name)
    folder = value.rpartition(":")[2].partition("/")[0]  # one that is missing
    assert re.search(rf"\b{name}\b", line) or any(part in line for part in (option, value, folder)), line
    assert contents(place) == before


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("demo", "serve")])
def test_a_call_that_is_right_works(good, place, tmp_path, monkeypatch, command):
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert good(*call(command), root=tmp_path)
