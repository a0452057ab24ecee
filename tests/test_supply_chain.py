"""What the library is made of, and what it never does: no pickle, no code from strings, no file written blindly."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from igeood.datasets import DATASETS
from igeood.errors import InputError
from igeood.networks import load_weights, read_weights

tomllib = pytest.importorskip("tomllib")  # Python 3.11
ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "igeood").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


MODULES = {  # importing one is enough to be asked why
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "jsonpickle", "joblib", "marshal", "shelve", "dbm", "yaml",
    "subprocess", "pty", "runpy", "code", "ctypes", "multiprocessing", "xmlrpc", "xml", "telnetlib", "ftplib",
}  # fmt: skip
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "tempfile.mktemp", "shutil.unpack_archive",
    "torch.jit.load", "torch.export.load", "torch.package.PackageImporter", "torch.hub.load",
    "torch.classes.load_library", "torch.hub.load_state_dict_from_url", "torch.ops.load_library",
    "torch.serialization.add_safe_globals", "torch.serialization.safe_globals", "pandas.read_pickle", "pandas.eval",
    "numpy.ctypeslib.load_library", "ssl._create_unverified_context", "urllib.request.urlopen",
    "urllib.request.urlretrieve", "urllib.request.build_opener", "importlib.util.spec_from_file_location",
    "importlib.util.module_from_spec", "hashlib.md5", "hashlib.sha1", "pyarrow.ipc.open_file",
    "pyarrow.ipc.open_stream", "scipy.io.readsav",
}  # fmt: skip
WITH = {  # allowed only with this keyword, spelt out
    "torch.load": ("weights_only", True), "numpy.load": ("allow_pickle", False),
    "numpy.lib.format.read_array": ("allow_pickle", False), "numpy.lib.npyio.NpzFile": ("allow_pickle", False),
    "hashlib.new": ("usedforsecurity", False),
}  # fmt: skip
KEYWORDS = {
    ("shell", True), ("verify", False), ("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True),
    ("cache", True),
}  # fmt: skip
PREFIXES = ("os.exec", "os.spawn", "os.posix_spawn", "os.startfile")

ALLOWED = {
    ("datasets/download.py", "urllib.request.build_opener"): "`data get`: http or https, size and checksum",
    ("cli/_models.py", "importlib.import_module"): "--model MODULE:NAME is the user's own code, named by the user",
    ("geometry/fused.py", "cache=True"): "the extra `fast`: numba keeps machine code beside Python's own .pyc files",
    ("datasets/catalog.py", "http://"): "the owners serve nothing else; see the test of checksums",
    ("datasets/download.py", "http://"): "what a redirection may go to, from http only",
}  # fmt: skip


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """`a.b.c` with what `a` was imported as; empty for what is no such name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names) or '?'}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def imported(tree: ast.AST) -> dict[str, str]:
    """Local names and what they stand for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def is_own_module(argument: ast.expr) -> bool:
    """Whether the name of a module to import begins, in the source, with this library's own."""
    first = argument.values[0] if isinstance(argument, ast.JoinedStr) and argument.values else argument
    return isinstance(first, ast.Constant) and str(first.value).startswith("igeood.")


def hazards_of_call(node: ast.Call, names: dict[str, str]) -> list[str]:
    name = dotted(node.func, names)
    keywords = {(k.arg, getattr(k.value, "value", None)) for k in node.keywords}
    found = [f"{key}={value}" for key, value in sorted(keywords & KEYWORDS, key=str)]
    found += [name] if name in CALLS or name.startswith(PREFIXES) else []
    found += [name] if name in WITH and WITH[name] not in keywords else []
    if name in {"importlib.import_module", "importlib.__import__"} and not is_own_module(node.args[0]):
        found.append(name)
    if (
        name.endswith((".extractall", ".extract"))
        and not name.startswith("igeood.")
        and ("filter", "data") not in keywords
    ):
        found.append(name.rpartition(".")[2])
    return found


def hazards(text: str) -> Counter[str]:
    """What a source text does that needs a reason, and how often."""
    tree = ast.parse(text)
    names, found = imported(tree), Counter()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found.update(f"import {m.split('.')[0]}" for m in modules if m.split(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            found.update(hazards_of_call(node, names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match("http://", node.value, re.I):
            found["http://"] += 1
    return found


def test_the_source_does_nothing_that_needs_a_reason_but_what_has_one():
    folder = ROOT / "src" / "igeood"
    found = {(str(p.relative_to(folder)), what) for p in SOURCES for what in hazards(p.read_text(encoding="utf-8"))}
    assert len(SOURCES) > 70
    assert found == set(ALLOWED)  # nothing else, and no reason left over


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import pickle", "import pickle"),
        ("from pickle import loads as f", "import pickle"),
        ("import joblib.externals", "import joblib"),
        ("from multiprocessing.pool import ThreadPool", "import multiprocessing"),
        ("import yaml; yaml.load(x)", "import yaml"),
        ("eval('1')", "eval"),
        ("exec(x)", "exec"),
        ("compile(x, '', 'exec')", "compile"),
        ("__import__(x)", "__import__"),
        ("import torch; torch.load(p)", "torch.load"),
        ("import torch as t; t.load(p, weights_only=flag)", "torch.load"),
        ("from torch import load as l; l(p, weights_only=False)", "torch.load"),
        ("import torch.jit; torch.jit.load(p)", "torch.jit.load"),
        ("import numpy as np; np.load(p)", "numpy.load"),
        ("import numpy as np; np.load(p, allow_pickle=True)", "allow_pickle=True"),
        ("import os; os.system(x)", "os.system"),
        ("from os import execv; execv(x, y)", "os.execv"),
        ("run(x, shell=True)", "shell=True"),
        ("from subprocess import run", "import subprocess"),
        ("get(x, verify=False)", "verify=False"),
        ("archive.extractall(p)", "extractall"),
        ("import tarfile\nwith tarfile.open(p) as t: t.extract(m, p)", "extract"),
        ("tarfile.open(p).extractall(q)", "extractall"),
        ("import shutil as s; s.unpack_archive(p)", "shutil.unpack_archive"),
        ("import tempfile; tempfile.mktemp()", "tempfile.mktemp"),
        ("from hashlib import md5; md5(x)", "hashlib.md5"),
        ("import hashlib; hashlib.new('md5')", "hashlib.new"),
        ("import importlib; importlib.import_module(x)", "importlib.import_module"),
        ("from importlib import import_module as i; i(f'{x}.igeood.')", "importlib.import_module"),
        ("import importlib.util as u; u.spec_from_file_location(a, b)", "importlib.util.spec_from_file_location"),
        ("import urllib.request; urllib.request.urlopen(u)", "urllib.request.urlopen"),
        ("x = 'http://example.org'", "http://"),
        ("y = f'HTTP://{x}'", "http://"),
        ("import numba; numba.njit(cache=True)", "cache=True"),
    ],
)
def test_the_search_finds(text, what):
    assert hazards(text)[what] == 1


@pytest.mark.parametrize(
    "text",
    [
        "import torch; torch.load(p, weights_only=True)",
        "import numpy as np; np.load(p, allow_pickle=False)",
        "model.eval(); x.compile(); re.compile('a')",
        "import importlib; importlib.import_module(f'igeood.{name}')",
        "from igeood.extraction import extract; extract(m, l); import igeood; igeood.extract(m, l)",
        "t.extractall(p, filter='data')",
        "import hashlib; hashlib.sha256(x); hashlib.new(a, usedforsecurity=False)",
        "'https://example.org, not http://'",
    ],
)
def test_the_search_lets_pass(text):
    assert not hazards(text)


def test_every_download_over_plain_http_has_a_checksum():
    plain = [d for dataset in DATASETS.values() for d in dataset.downloads if d.url.startswith("http:")]
    assert plain
    assert [d.url for d in plain if not re.fullmatch("md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}", d.checksum or "")] == []


# What bandit asks about, at medium severity or above: (file, its test): (how often, why it is right).
ASKED = {
    ("datasets/store.py", "B615"): (1, "`load_dataset` is this library's own: local files, no hub"),
    ("report/drawing.py", "B704"): (1, "matplotlib's own SVG, which escapes the texts it is given"),
    ("report/page.py", "B704"): (3, "the library's own style and script; and a text that is escaped first"),
}


def bandit(*paths):
    command = [sys.executable, "-m", "bandit", "-q", "-ll", "-f", "json", "-r", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["errors"] == []
    return found


def test_bandit_asks_about_nothing_else(tmp_path):
    pytest.importorskip("bandit")
    bad = tmp_path / "bad.py"
    bad.write_text("import pickle\npickle.loads(x)\neval(y)\n", encoding="utf-8")
    found = bandit(ROOT / "src" / "igeood", bad)
    here = {result["test_id"] for result in found["results"] if result["filename"] == str(bad)}
    assert here == {"B301", "B307"}  # it looks
    folder = ROOT / "src" / "igeood"
    rest = Counter(
        (str(Path(result["filename"]).relative_to(folder)), result["test_id"])
        for result in found["results"]
        if result["filename"] != str(bad)
    )
    assert rest == {key: number for key, (number, _) in ASKED.items()}
    assert len(found["metrics"]) >= len(SOURCES)
    assert not [
        path for path in SOURCES if re.search(r"#\s*nosec", path.read_text(encoding="utf-8"))
    ]  # exceptions are listed here


def test_a_checkpoint_of_sparse_tensors_is_refused(tmp_path):
    """Their indices are not checked when they are loaded, and may point outside."""
    model = torch.nn.Linear(4, 3)
    outside = torch.sparse_coo_tensor([[0, 9_000_000], [0, 3]], torch.ones(2), (3, 4), check_invariants=False)
    torch.save({**model.state_dict(), "weight": outside}, tmp_path / "sparse.pt")
    for read in (read_weights, lambda path: load_weights(model, path)):
        with pytest.raises(InputError, match=r"weights: .*sparse\.pt holds no state dict of dense tensors; save"):
            read(tmp_path / "sparse.pt")


WATCH = """
import pickle, sys
calls = []
def watch(event, args):
    if event in ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"):
        calls.append((event, args[:2]))
def refuse(*args, **kwargs):
    raise AssertionError("unpickled")
for module in (pickle, sys.modules["_pickle"]):
    module.load = module.loads = refuse
sys.addaudithook(watch)
sys.modules["numba"] = None  # an extra, which keeps its machine code in files of its own
"""

GUARDS = """
import igeood, numpy as np, torch
from torch import nn
from igeood.cli import main
torch.manual_seed(0)
y = torch.arange(120) % 4
x = torch.rand(120, 3, 8, 8) + 0.5 * y[:, None, None, None]
front = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
model = nn.Sequential(*front, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
torch.save(model.state_dict(), "net.pt")
igeood.networks.load_weights(model, "net.pt")
for make in (igeood.black_box, igeood.grey_box, igeood.white_box):
    guard = make(model).fit([(x[:60], y[:60])])
    guard.tune(x[60:], torch.rand(60, 3, 8, 8) * 3, share=0.4, epsilons=(0, 1e-3)).calibrate(x[60:])
    guard.save("guard.safetensors")
    assert igeood.load("guard.safetensors", model).predict(x).score.shape == (120,)
outputs = igeood.extract(model, [(x, y)])
for kind in ("npz", "parquet"):
    for part, rows in (("train", slice(0, 60)), ("rest", slice(60, 120))):
        igeood.write_logits(f"{part}.{kind}", outputs[rows])
    igeood.write_logits(f"ood.{kind}", np.random.default_rng(0).normal(size=(60, 4)))
    guard, train, rest, ood = f"{kind}.safetensors", f"train.{kind}", f"rest.{kind}", f"ood.{kind}"
    for command in (
        ["fit", train, "--out", guard], ["tune", guard, "--train", train, "--id", rest, "--ood", ood],
        ["calibrate", guard, rest], ["score", guard, rest, "--out", f"{kind}.csv"],
    ):
        main(command, standalone_mode=False)
"""

BENCH = """
from pathlib import Path
from made import make_plan, make_world
from igeood.benchmark import load_network, run
from igeood.cli import main
world = make_world(Path("world"))
less = {"limit": 10, "images": 40, "train": 100, "methods": ("msp", "igeood-logits", "igeood")}
plan = make_plan(world, ood=("gaussian",), settings=("black-box", "white-box"), **less)
run([load_network("world/net.safetensors")], plan, "out", root=world)
main(["report", "out", "--out", "page.html"], standalone_mode=False)
assert Path("page.html").stat().st_size > 10_000
"""

DEMO = """
from igeood.cli import main
main(["demo", "--out", "demo"], standalone_mode=False)
"""

TOLD = "\nprint(sorted({call for call in calls}), len(sys.modules) > 500)"


def watched(code, folder):
    """What a run unpickled or started, in a process where `pickle.load` fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "benchmark"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", WATCH + code + TOLD]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "code", [GUARDS, BENCH, pytest.param(DEMO, marks=pytest.mark.slow)], ids=["guards", "bench", "demo"]
)
def test_nothing_is_unpickled_and_no_process_started(code, tmp_path):
    assert watched(code, tmp_path) == "[] True"


def test_the_watch_sees_an_unpickled_object(tmp_path):
    code = "import io, fractions\npickle.Unpickler(io.BytesIO(pickle.dumps(fractions.Fraction(1)))).load()"
    assert "('pickle.find_class', ('fractions', 'Fraction'))" in watched(code, tmp_path)
    with pytest.raises(AssertionError, match="unpickled"):
        watched("pickle.loads(pickle.dumps(1))", tmp_path)


def requirements():
    """Every direct dependency: of the library, of each extra, of the build; but not the library itself."""
    project = PROJECT["project"]
    texts = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        texts += extra
    found = [Requirement(text) for text in texts]
    return [requirement for requirement in found if requirement.name != project["name"]]


def pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def test_each_direct_dependency_has_one_exact_pin_that_it_allows():
    names = [canonicalize_name(pin.name) for pin in pins()]
    assert sorted(names) == sorted({canonicalize_name(requirement.name) for requirement in requirements()})
    pinned = {canonicalize_name(pin.name): pin for pin in pins()}
    for requirement in requirements():
        pin = pinned[canonicalize_name(requirement.name)]
        assert re.fullmatch(r"==\d+(\.\d+)+(\.post\d+)?", str(pin.specifier)), pin  # no build, no range
        assert pin.url is None
        assert requirement.specifier.contains(str(pin.specifier)[2:]), (requirement, pin)


def test_the_environment_has_the_pinned_versions():
    """In an environment made with constraints.txt, as every target of the Makefile makes it."""
    if not Path(sys.prefix).is_relative_to(ROOT):
        pytest.skip("not the project's own environment")
    assert {pin.name: Version(version(pin.name)).public for pin in pins()} == {
        pin.name: str(pin.specifier)[2:] for pin in pins()
    }


# The first version without what is known of loading files (CVE, and PYSEC where it has no other name).
SAFE_FROM = {
    "torch": "2.11",  # CVE-2025-32434 and CVE-2026-24747 (weights only), CVE-2026-4538 (exported programs)
    "pyarrow": "23.0.1",  # CVE-2023-47248 (Parquet), CVE-2026-25087 (IPC)
    "pillow": "12.3",  # CVE-2026-25990, CVE-2026-40192, PYSEC-2026-2253 to 2257
    "jinja2": "3.1.6",  # CVE-2025-27516
    "scikit-learn": "1.5",  # CVE-2024-5206
}


@pytest.mark.parametrize("name", SAFE_FROM)
def test_the_lowest_version_allowed_has_no_known_hole(name):
    (requirement,) = (r for r in requirements() if canonicalize_name(r.name) == name)
    lowest = [Version(part.version) for part in requirement.specifier if part.operator == ">="]
    assert lowest
    assert min(lowest) >= Version(SAFE_FROM[name])


def test_the_bill_of_materials_lists_every_direct_dependency(tmp_path):
    pytest.importorskip("cyclonedx_py")
    if shutil.which("make") is None:
        pytest.skip("needs make")
    told = {"BIN": Path(sys.executable).parent, "SBOM": tmp_path / "sbom.json", "SBOM_ARGS": "--no-validate"}
    command = ["make", "-o", "install", "sbom", *(f"{name}={value}" for name, value in told.items())]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    bill = json.loads((tmp_path / "sbom.json").read_text(encoding="utf-8"))
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "igeood"
    listed = {canonicalize_name(part["name"]): part["version"] for part in bill["components"]}
    for requirement in requirements():
        assert listed[canonicalize_name(requirement.name)] == version(requirement.name)
    assert "timestamp" not in bill["metadata"]  # the same environment gives the same file
    assert "serialNumber" not in bill
