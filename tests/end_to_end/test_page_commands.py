"""The commands that README and the pages on operating a guard show run as they are, on small files of those names."""

import re
import shlex
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import igeood
from igeood.cli import main

pytest.importorskip("starlette")
pytest.importorskip("onnxruntime")
from igeood.serve import run as serving

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("export", "production", "scale"))]
MODULE = """
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
"""
FILES = {"train/a": "train", "train/b": "train", "part-07": "train", "logits/a": "train", "logits/b": "train"}
FILES |= {"held-out": "held_out", "fresh": "held_out", "foreign": "ood", "new/a": "test", "new/b": "test"}


def lines_of(page):
    """Commands of the shell blocks, as lists of words."""
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line.split(" && ")[0], comments=True):
                yield words


def is_run(words):
    """Not installing, nor a cluster: tests/work has Ray, tests/end_to_end/test_release.py the installation."""
    return words[0] == "igeood" and "ray" not in words


@pytest.fixture
def folder(make, tmp_path, monkeypatch):
    """The current folder, with files of logits, a model and its weights, and guards without and with the model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    drawn = make(n_classes=4, n=1000, margin=6.0)
    for name, part in FILES.items():
        path = tmp_path / f"{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        labels = drawn.labels if part in ("train", "held_out") else None
        igeood.write_logits(path, igeood.Outputs(getattr(drawn, part), labels=labels))
    (tmp_path / "my_package.py").write_text(MODULE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    x = torch.randn(1000, 6)
    np.savez(tmp_path / "input.npz", x=x[:4].numpy())
    igeood.black_box(model).fit((x[:500], model(x[:500]).argmax(dim=1))).calibrate(x[500:]).save("of-model")
    igeood.black_box().fit(drawn.train, drawn.labels).calibrate(drawn.held_out).save("of-logits")
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page, folder, monkeypatch):
    served = []
    monkeypatch.setattr(serving, "listen", lambda *_, **__: nullcontext())
    monkeypatch.setattr(serving, "run", lambda _, service, __: (service.close(), served.append(service)))
    commands = [words for words in lines_of(page) if is_run(words)]
    assert commands
    for words in commands:
        shutil.copy(folder / ("of-model" if "--model" in words else "of-logits"), folder / "guard.safetensors")
        for state in folder.glob("*.monitor.json"):  # of another guard of this name
            state.unlink()
        replacing = ["--force"] * any("--force" in option.opts for option in main.get_command(None, words[1]).params)
        result = CliRunner().invoke(main, [*words[1:], *replacing])
        assert result.exit_code == 0, (words, result.output)
    assert len(served) == sum(words[1] == "serve" for words in commands)
