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
LAB = {"networks": "net.safetensors", "settings": "black-box", "methods": "msp", "images": "40", "out": "results"}
GOOD = {
    "fit": {"train": "train.npz", "out": "new.safetensors"},
    "merge": {"summaries": "train.summary", "out": "new.safetensors"},
    "tune": {"guard": "fitted.safetensors", "train": "train.npz", "id_data": "held_out.npz", "ood": "ood.npz"},
    "calibrate": {"guard": "fitted.safetensors", "id_data": "held_out.npz"},
    "check": {"guard": "guard.safetensors", "data": "test.npz"},
    "score": {"guard": "guard.safetensors", "data": "test.npz"},
    "monitor": {"guard": "guard.safetensors", "verdicts": "verdicts.csv"},
    "serve": {"guard": "guard.safetensors", "port": "0"},
    "export": {"guard": "guard.safetensors", "out": "new.onnx"},
    "bench": {**LAB, "ood": "folder:red"},
    "paper": {"name": "accuracy", "results": "results"},
    "report": {"results": "results"},
    "train": {"network": "resnet-10-16", "out": "new.safetensors", "epochs": "1", "limit": "20", "batch": "10"},
    "data get": {"names": "gaussian"},
    "data list": {},
    "demo": {},
}
# Wrong values, each with its parameters, by name or by command and name; a type's wrong value comes before it.
WRONG = {
    "none.npz": "train id_data ood data example",
    "none.safetensors": "guard networks paper.networks",
    "none.csv": "verdicts",
    "none.txt": "classes key_file",
    "none.pt": "weights",
    "none": "results summaries tune.summary",
    "train.npz": "root bench.out demo.out paper.out state picture keep_flagged",
    "train.npz/new.safetensors": "out",
    "train.npz/new": "summary",
    "new.txt": "train.out",
    "folder:none": "bench.ood",
    "magic": "method methods settings options",
    "nope": "layers logits_column label_column id_column model validation address tokenizer text_column check.ood",
    "cifar-1": "in_distribution names train.data",
    "resnet": "network",
    "table-9": "name",
    "a/b": "serve.name",
    "192.0.2.1": "host",
    "lots": "budget max_body",
    "soon": "max_delay",
    "a": "mean",
    "0": "std",
}
BAD = {name: value for value, names in WRONG.items() for name in names.split()}
ANY = "check.label_column calibrate.label_column score.label_column score.address"
ANY += " export.label_column export.id_column export.logits_column"
BAD |= dict.fromkeys(ANY.split())  # any value is right, or another option is wrong first


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
def test_a_wrong_value_is_one_line_and_touches_nothing(bad, place, monkeypatch, command, name, value):
    monkeypatch.chdir(place)
    before = contents(place)
    line = bad(*call(command, **{name: value}), root=place)
    option = next(param.opts[0] for param in COMMANDS[command].params if param.name == name)
    folder = value.rpartition(":")[2].partition("/")[0]  # one that is missing
    assert re.search(rf"\b{name}\b", line) or any(part in line for part in (option, value, folder)), line
    assert contents(place) == before


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("demo", "serve")])
def test_a_call_that_is_right_works(good, place, tmp_path, monkeypatch, command):
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert good(*call(command), root=tmp_path)
