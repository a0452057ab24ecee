"""What the documentation shows is true: its code, commands and examples run, links lead somewhere, the site builds."""

import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner

import igeood
import igeood.bench.methods
from igeood.cli import main
from igeood.model.reader import random_state_kept

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.parent.name != "reproduction")
WRITTEN = [*PAGES, *sorted(ROOT.glob("*.md")), ROOT / "examples" / "README.md"]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```)?", re.S | re.M)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
NEEDS = {"production.md": "tritonclient.http", "export.md": "onnxruntime"}
NEEDS |= {"hugging_face_text.py": "transformers", "image_folder.py": "PIL"}
NEEDS |= {"ray_files.py": "ray", "service_client.py": "uvicorn"}
EXAMPLES = ROOT / "examples"
SLOW = {"ray_files.py": [pytest.mark.slow]}
MADE_UP = {"drift.md", "files.md", "guarantees.md", "production.md", "threshold.md"}  # figures of seeded draws


def text_of(path):
    return path.read_text(encoding="utf-8")


def name(path):
    return str(path.relative_to(ROOT))


def shape(text):
    """Each line up to its first figure: what follows differs from machine to machine where networks are trained."""
    return [NUMBER.split(re.sub("True|False", "bool", line))[0].split() for line in text.splitlines()]


@pytest.mark.parametrize("page", [path for path in [*PAGES, README] if BLOCK.search(text_of(path))], ids=name)
@patch.dict(igeood.METHODS)  # what a page registers is gone after it
def test_python_blocks_run_in_order_and_print_what_the_page_says(page, reader_names, tmp_path, monkeypatch, capsys):
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    monkeypatch.chdir(tmp_path)
    for block in BLOCK.finditer(text_of(page)):
        if ".export(" in block["code"] and find_spec("onnxruntime") is None:
            continue
        exec(block["code"], reader_names)  # noqa: S102 (our own pages)
        printed, shown = capsys.readouterr().out, block["printed"]
        if shown is not None:
            assert shape(printed) == shape(shown), printed
        if shown is not None and page.name in MADE_UP:
            numbers, expected = ([float(number) for number in NUMBER.findall(text)] for text in (printed, shown))
            assert numbers == pytest.approx(expected, rel=0.05, abs=0.01), printed


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_links_and_the_files_of_the_source_that_a_page_names_exist(page):
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.S | re.M)
    links = [page.parent / link for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", prose) if "://" not in link]
    named = [ROOT / path for path in re.findall(r"\b(?:tests|src|benchmarks|docs)/[\w/-]+(?:\.\w+)?", prose)]
    assert [str(path) for path in [*links, *named] if not path.exists()] == []


def test_the_navigation_has_every_page_once():
    tree = re.search(r"^nav:\n(.*?)\n\n", text_of(ROOT / "mkdocs.yml"), re.S | re.M)[1]
    assert sorted(re.findall(r": (\S+\.md)$", tree, re.M)) == sorted(str(path.relative_to(DOCS)) for path in PAGES)


def test_the_tables_of_methods_have_every_method_with_its_title():
    table = re.findall(r"^\| `([\w+-]+)` \| ([^|]*?) \|[^|]*\|[^|]+\|$", text_of(DOCS / "methods.md"), re.M)
    assert dict(table) == {name: method.title for name, method in igeood.METHODS.items()}


def test_the_excerpts_of_the_comparison_are_what_the_comparison_says():
    whole = text_of(DOCS / "comparison.md").splitlines()
    excerpt = re.findall(r"^\| `[^`]+` \| [\d.]+ / .*$", text_of(DOCS / "methods.md"), re.M)
    plain = text_of(README).replace("*", "").replace(" (all layers)", "")
    excerpt += re.findall(r"^(\| `[^`]+` \| [\d.]+ / .*?) *\|$", plain, re.M)
    assert excerpt
    assert [line for line in excerpt if not any(full.startswith(line) for full in whole)] == []


def test_the_calls_in_the_readmes_table_work(reader_names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = re.findall(r"`((?:igeood|guard)\.[^`]+\))`", text_of(README))
    assert calls
    names = {"igeood": igeood, "path": "guard.safetensors", "shard": reader_names["train_loader"], **reader_names}
    names["loader"] = reader_names["held_out_loader"]
    names["guard"] = igeood.white_box(names["model"], method="probe").fit(names["train_loader"])
    for call in calls:
        names["guard"].calibrate(names["held_out_loader"])  # `tune` undoes it
        exec(call, names)  # noqa: S102 (our own text_of(README))


def test_the_tree_names_every_part_of_the_source():
    tree = re.search(r"```\nsrc/igeood/\n(.*?)```", text_of(ROOT / "CONTRIBUTING.md"), re.DOTALL)[1]
    folder = ROOT / "src" / "igeood"
    parts = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    parts |= {path.name for path in folder.glob("*.py")} - {"__init__.py", "version.py", "terminal.py"}
    assert {part for part in parts if not re.search(rf"^  {re.escape(part)} ", tree, re.M)} == set()


def command_lines():
    """Calls of `igeood` in the shell blocks, as lists of words; those of the command line's page are run."""
    for page in [*PAGES, README]:
        if page.name != "command-line.md":
            for block in re.findall(r"^```sh\n(.*?)^```", text_of(page), re.S | re.M):
                for line in block.replace("\\\n", " ").splitlines():
                    words = shlex.split(re.split(r" > | && ", line)[0], comments=True)
                    if words[:1] == ["igeood"] and len(words) > 1:
                        yield words[1:]


def test_every_command_can_be_parsed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in command_lines():
        command, (name, *rest) = main.get_command(None, words[0]), words
        if isinstance(command, click.Group):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context(name, rest)


def test_the_list_of_commands_is_complete():
    page = text_of(DOCS / "command-line.md")
    assert {*re.findall(r"^\| `igeood (\w+)", page, re.M)} == {*main.list_commands(None)}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` builds it: a warning is an error."""
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: the extra `docs` has it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return {str(path.relative_to(folder)): text_of(path) for path in folder.rglob("*.html")}


def test_the_site_requests_nothing_from_elsewhere(site):
    for page, text in site.items():
        addresses = re.findall(r'<(?:script|img|iframe|source)\b[^>]*?\bsrc=["\']?([^"\'\s>]+)', text)
        addresses += re.findall(r'<link\b[^>]*?\bhref=["\']?([^"\'\s>]+)', text)
        assert addresses, page
        assert [address for address in addresses if re.match(r"(https?:)?//", address)] == [], page


def test_every_public_name_is_in_the_reference(site):
    reference = "".join(text for page, text in site.items() if page.startswith("api"))
    assert [public for public in igeood.__all__ if f'id="igeood.{public}"' not in reference] == []


def test_formulas_of_pages_and_docstrings_are_mathml(site):
    assert "<math" in site["api/geometry.html"]
    for page, text in site.items():
        assert not re.search(r":math:|\.\. math::", text), page
        for formula in re.findall(r"<math.*?</math>", text, re.S):
            ElementTree.fromstring(formula)  # noqa: S314 (our own pages)


STEP = re.compile(
    r"cat > (?P<file>\S+) <<'END'\n(?P<text>.*?\n)END$|python -c '(?P<code>.*?)'$|(?P<line>[^\n]+)$", re.S | re.M
)


def run_shell(line, given=None):
    return subprocess.run(["/bin/sh", "-ec", line], input=given, capture_output=True, text=True, check=True).stdout


def run_step(step):
    """What one command of a shell block prints to stdout, once it went where `| rest` or `> rest` sends it."""
    if step["file"]:
        Path(step["file"]).write_text(step["text"])
        return ""
    if step["code"] or step["line"].startswith("python "):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(step["code"] or Path(step["line"].split()[1]).read_text(), {})  # noqa: S102 (our own page)
        return printed.getvalue()
    if not step["line"].startswith("igeood "):
        return run_shell(step["line"])
    line, way, rest = re.fullmatch(r"igeood (.*?)(?: ([|>]) (.+))?", step["line"]).groups()
    result = CliRunner().invoke(main, shlex.split(line))
    assert result.exit_code == 0, result.output
    return run_shell(rest if way == "|" else f"cat > {rest}", result.stdout) if way else result.stdout


def test_the_commands_of_the_page_run_and_print_the_entries_that_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    blocks = re.findall(r"```sh\n(.*?)```\n(?:\n```\n(.*?)```)?", text_of(DOCS / "command-line.md"), re.DOTALL)
    assert blocks
    for commands, shown in blocks:
        printed = "".join(map(run_step, STEP.finditer(commands)))
        entries, expected = ([words[:1] for words in shape(text)] for text in (printed, shown))
        assert [entry for entry in entries if entry not in expected] == [], printed
    sys.modules.pop("nets", None)


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=SLOW.get(path.name, []), id=path.stem) for path in sorted(EXAMPLES.glob("*.py"))]
)
def test_an_example_runs_offline_and_prints_the_lines_that_its_readme_shows(path, tmp_path, monkeypatch, capsys):
    if path.name in NEEDS:
        pytest.importorskip(NEEDS[path.name])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    if path.stem == "torchrun":
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(path)]
        out = subprocess.run(launch, capture_output=True, text=True, timeout=600, check=True).stdout
    else:
        with random_state_kept():
            runpy.run_path(str(path), run_name="__main__")
        out = capsys.readouterr().out
    shown = re.search(rf"^## `{path.name}`.*?```text\n(.*?)```", text_of(EXAMPLES / "README.md"), re.S | re.M)
    assert shape(out) == shape(shown[1]), out
    assert list(tmp_path.iterdir()) == []
