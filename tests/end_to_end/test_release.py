"""What a stranger picks up: a wheel and a source archive that install and run, with the same version everywhere."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import igeood

ROOT = Path(__file__).parent.parent.parent


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_citation_and_changelog_name_the_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    (released,) = re.findall(r"^date-released: (.+)$", citation, re.M)
    assert re.findall(r"^version: (.+)$", citation, re.M) == [igeood.__version__]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", changes, re.M)[0] == f"{igeood.__version__} ({released})"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the source archive that `python -m build` makes: the wheel from the archive."""
    pytest.importorskip("build", reason="build is not installed: the extra `dev` has it")
    folder = tmp_path_factory.mktemp("dist")
    pinned = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, env=pinned)
    (wheel,) = folder.glob("*.whl")
    (archive,) = folder.glob("*.tar.gz")
    return wheel, archive


@pytest.mark.slow
def test_wheel_and_archive_have_every_file_of_the_package(built):
    wheel, archive = built
    tracked = run("git", "ls-files", "src/igeood", cwd=ROOT).splitlines()
    package = {name.removeprefix("src/") for name in tracked}
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    assert package - names == set()
    assert "igeood/py.typed" in names
    assert not [name for name in names if not name.startswith(("igeood/", f"igeood-{igeood.__version__}"))]
    with tarfile.open(archive) as file:
        sources = {name.partition("/")[2] for name in file.getnames()}
    whole = set(run("git", "ls-files", cwd=ROOT).splitlines())
    assert {name for name in whole - sources if not name.startswith((".ci/", ".git"))} == set()


@pytest.mark.slow
def test_the_demonstration_runs_from_the_wheel_in_a_new_environment(built, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    quiet = ("--quiet", "--disable-pip-version-check")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pinned = ("-c", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", *quiet, *pinned, f"{built[0]}[data,report]", env=alone)
    where = run(python, "-c", "import igeood; print(igeood.__version__, igeood.__file__)", cwd=tmp_path, env=alone)
    assert where.split()[0] == igeood.__version__
    assert Path(where.split()[1]).is_relative_to(tmp_path)
    demo = (tmp_path / "venv" / "bin" / "igeood", "demo", "--out", "demo", "--json")
    told = json.loads(run(*demo, cwd=tmp_path, env=alone))
    assert told["promise"]
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000
