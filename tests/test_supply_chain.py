"""What the library is made of, and what it never does: no pickle, no code from strings, no unchecked download."""

import ast
import json
import re
import subprocess
import sys
from importlib.metadata import metadata, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from igeood.bench.datasets import DATASETS

tomllib = pytest.importorskip("tomllib")  # Python 3.11
ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

MODULES = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "yaml", "subprocess", "runpy", "ctypes", "xml"}
CALLS = {"eval", "exec", "__import__", "resolve_name", "os.system", "urllib.request.urlopen"}
CALLS |= {"torch.jit.load", "torch.hub.load"}
WITH = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False"}  # allowed only with this, spelt out
ALLOWED = {
    ("cli/__init__.py", "import_module(COMMANDS[cmd_name])"): "the library's own commands",
    ("model/factory.py", "resolve_name"): "--model MODULE:NAME is the user's own code, named by the user",
    ("detectors/__init__.py", "import_module(f'{__name__}.{_module.name}')"): "the library's own detectors",
    ("errors.py", "import_module(module)"): "an extra, by a name in the source",
}


def hazards(text):
    """What a source text does that needs a reason."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"import {name}" for name in names if name.split(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            name, keywords = ast.unparse(node.func), {ast.unparse(word) for word in node.keywords}
            needed = "filter='data'" if name.endswith(".extractall") else WITH.get(name)
            if name in CALLS or (needed and needed not in keywords) or "shell=True" in keywords:
                yield name
            if name.endswith("import_module") and not re.match("f?'igeood", ast.unparse(node.args[0])):
                yield f"import_module({ast.unparse(node.args[0])})"


def test_the_source_does_nothing_that_needs_a_reason_but_what_has_one():
    folder = ROOT / "src" / "igeood"
    texts = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    assert {(file, what) for file, text in texts.items() for what in hazards(text)} == set(ALLOWED)  # none left over
    assert all(list(hazards(text)) for text in ("import pickle", "torch.load(p)", "t.extractall(p)"))


def test_every_download_over_plain_http_has_a_checksum():
    plain = [d for dataset in DATASETS.values() for d in dataset.downloads if d.url.startswith("http:")]
    assert plain
    assert [d.url for d in plain if not re.fullmatch("md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}", d.checksum or "")] == []


WATCHED = """
import pickle, sys
import igeood, numpy as np, torch
from click.testing import CliRunner
from igeood.cli import main
calls = []
sys.addaudithook(lambda event, args: calls.append(event) if event in (
    "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen") else None)
draw, labels = np.random.default_rng(0), np.arange(120) % 4
logits = draw.normal(size=(120, 4)) + 5 * np.eye(4)[labels]
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
x = torch.from_numpy(logits).float()
for make in (igeood.black_box, igeood.grey_box, igeood.white_box):
    make(model).fit((x, torch.from_numpy(labels))).calibrate(x + 1).save("guard.safetensors")
    assert len(igeood.load("guard.safetensors", model).predict(x)) == 120
for part, scale in (("train.parquet", 1.0), ("rest.npz", 1.1), ("ood.npz", 0.1)):
    igeood.write_logits(part, logits * scale, labels)
for command in ("fit train.parquet --out g", "tune g --train train.parquet --id rest.npz --ood ood.npz",
                "calibrate g rest.npz", "score g rest.npz --out scores.csv"):
    assert CliRunner().invoke(main, command.split()).exit_code == 0
before = len(calls)
pickle.loads(pickle.dumps(igeood.Needs()))
print(before, len(calls) > before)
"""


HEAVY = ("scipy", "sklearn", "pyarrow", "matplotlib", "optuna", "pandas", "PIL", "click", "torchvision", "pooch")
FIRST_LINES = f"""
import sys, igeood
assert "torch" not in sys.modules
igeood.black_box, igeood.grey_box, igeood.white_box, igeood.load, igeood.extract, igeood.Monitor
print([name for name in {(*HEAVY, "igeood.bench")} if name in sys.modules])
"""


def printed(code, folder):
    """The last line that a program prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_nothing_is_unpickled_no_process_started_and_heavy_parts_come_in_when_first_used(tmp_path):
    assert printed(WATCHED, tmp_path) == "0 True"  # and the watch sees what it looks for
    assert printed(FIRST_LINES, tmp_path) == "[]"


def requirements():
    """Every direct dependency: of the library, of each extra, of the build; but not the library itself."""
    project = PROJECT["project"]
    lists = [project["dependencies"], PROJECT["build-system"]["requires"], *project["optional-dependencies"].values()]
    return [r for texts in lists for r in map(Requirement, texts) if r.name != "igeood"]


def pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(r.name): r for r in map(Requirement, (line for line in lines if line and line[0] != "#"))}


# the first versions without known holes in loading files: SECURITY.md says which
SAFE_FROM = {"torch": "2.11", "pyarrow": "23.0.1", "pillow": "12.3", "jinja2": "3.1.6", "scikit-learn": "1.5"}


def test_each_direct_dependency_has_one_exact_pin_no_known_hole_and_a_permissive_licence():
    beside = {"pytorch-ood"}  # the Makefile installs it without what it asks for
    assert set(pins()) - beside == {canonicalize_name(requirement.name) for requirement in requirements()}
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        pin = str(pins()[name].specifier)
        assert re.fullmatch(r"==\d+(\.\d+)+(\.post\d+)?", pin), requirement  # no build, no range
        assert requirement.specifier.contains(pin[2:]), (requirement, pin)
        (lowest,) = [Version(part.version) for part in requirement.specifier if part.operator == ">="]
        assert lowest >= Version(SAFE_FROM.get(name, "0")), requirement
    for name in pins():
        about = metadata(name)
        classifiers = [line for line in about.get_all("Classifier", []) if line.startswith("License")]
        said = " ".join([about.get("License-Expression", ""), about.get("License", "")[:40], *classifiers])
        assert re.search("MIT|BSD|Apache|ISC|MPL|PSF|Python Software Foundation", said), (name, said)
        assert not re.search(r"\b[AL]?GPL", said), (name, said)


def test_the_bill_of_materials_lists_every_direct_dependency(tmp_path):
    pytest.importorskip("cyclonedx_py")
    given = {"BIN": Path(sys.executable).parent, "SBOM": tmp_path / "sbom.json", "SBOM_ARGS": "--no-validate"}
    command = ["make", "-o", "install", "sbom", *(f"{name}={value}" for name, value in given.items())]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    bill = json.loads((tmp_path / "sbom.json").read_text(encoding="utf-8"))
    listed = {canonicalize_name(part["name"]): part["version"] for part in bill["components"]}
    assert {name: listed[name] for name in pins()} == {name: version(name) for name in pins()}
    assert "timestamp" not in bill["metadata"]  # the same environment gives the same file
