"""What the documentation shows is true: its Python runs and prints what it says, links lead somewhere, it builds."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

import igeood
from igeood.cli import main

ROOT = Path(__file__).parent.parent
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "reproduction")
WRITTEN = [*PAGES, *sorted(ROOT.glob("*.md")), ROOT / "examples" / "README.md"]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```)?", re.S | re.M)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
NEEDS = {"text.md": "transformers", "production.md": "tritonclient.http", "export.md": "onnxruntime"}


def text_of(path):
    return path.read_text(encoding="utf-8")


def name(path):
    return str(path.relative_to(ROOT))


@pytest.fixture
def _methods_kept():
    """What a page registers is gone after it."""
    before = dict(igeood.METHODS)
    yield
    for method in igeood.METHODS.keys() - before.keys():
        del igeood.METHODS[method]


@pytest.mark.parametrize("page", [path for path in PAGES if BLOCK.search(text_of(path))], ids=name)
@pytest.mark.usefixtures("_methods_kept")
def test_python_blocks_run_in_order_and_print_what_the_page_says(page, reader_names, tmp_path, monkeypatch, capsys):
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    monkeypatch.chdir(tmp_path)
    for block in BLOCK.finditer(text_of(page)):
        exec(block["code"], reader_names)  # noqa: S102 (our own pages)
        printed, shown = capsys.readouterr().out, block["printed"]
        if shown is not None:  # words are the same; numbers nearly: networks differ from machine to machine
            assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split(), printed
            numbers, expected = ([float(number) for number in NUMBER.findall(text)] for text in (printed, shown))
            assert numbers == pytest.approx(expected, rel=0.3, abs=0.1), printed


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_links_and_the_files_of_the_source_that_a_page_names_exist(page):
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.S | re.M)
    links = [page.parent / link for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", prose) if "://" not in link]
    named = [ROOT / path for path in re.findall(r"\b(?:tests|src|benchmarks|docs)/[\w/-]+(?:\.\w+)?", prose)]
    assert [str(path) for path in [*links, *named] if not path.exists()] == []


def navigation():
    """The pages of the navigation, each with the names that lead to it, from the top."""
    pages, above = {}, []
    tree = re.search(r"^nav:\n(.*?)\n\n", text_of(ROOT / "mkdocs.yml"), re.S | re.M)[1]
    for spaces, title, page in re.findall(r"^( +)- (.+?):(?: (\S+))?$", tree, re.M):
        above[(len(spaces) - 2) // 4 :] = [title]
        if page:
            pages.setdefault(page, []).append(tuple(above))
    return pages


def test_the_navigation_has_five_parts_and_every_page_once():
    pages, docs = navigation(), ROOT / "docs"
    assert sorted(pages) == sorted(str(path.relative_to(docs)) for path in PAGES)
    assert {page: ways for page, ways in pages.items() if len(ways) > 1} == {}
    parts = [*dict.fromkeys(way[0] for (way,) in pages.values())]
    assert parts == ["Start", "Choose", "Operate", "Understand", "Reference"]


QUESTIONS = (
    "which threshold", "which method", "how many calibration samples", "flagged inputs", "drift", "serve", "onnx",
    "text", "100 million rows", "knn, vim, react and ash", "my own detector, or somebody else's",
)  # fmt: skip


def test_each_question_on_the_home_page_leads_to_a_page_two_clicks_deep(site):
    table = re.search(r"^\| question \| page \|\n.*?\n\n", text_of(ROOT / "docs" / "index.md"), re.S | re.M)[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:] if line]
    pages = navigation()
    for question, answer in rows:
        links = re.findall(r"\]\(([\w/.-]+\.md)(?:#([\w-]+))?\)", answer)
        assert links, question
        for page, place in links:
            assert len(pages[page][0]) == 2, question
            assert not place or f'id="{place}"' in site[page.replace(".md", ".html")], question
    asked = [question.lower() for question, _ in rows]
    assert [needed for needed in QUESTIONS if not any(needed in question for question in asked)] == []


def row(method):
    """A method's row of the table, but for the words on its score."""
    needs = igeood.METHODS[method].needs
    layers = {"none": "logits", "last": "last layer", "last two": "last two layers", "all": "all layers"}
    words = [layers.get(needs.layers, needs.layers), *["head"] * needs.head, *["labels"] * needs.labels, *needs.returns]
    return f"| `{method}` | {igeood.METHODS[method].title} | {', '.join(words)} |"


def test_the_table_of_methods_is_the_registry():
    table = re.findall(r"^(\| `[\w+-]+` \|[^|]*\|[^|]*\|)[^|]+\|$", text_of(ROOT / "docs" / "methods.md"), re.M)
    assert sorted(table) == sorted(map(row, igeood.METHODS))


def test_the_excerpt_of_the_comparison_is_what_the_comparison_says():
    excerpt = re.findall(r"^\| `[^`]+` \| [\d.]+ / .*$", text_of(ROOT / "docs" / "methods.md"), re.M)
    whole = text_of(ROOT / "docs" / "comparison.md").splitlines()
    assert len(excerpt) > 5
    assert [line for line in excerpt if not any(full.startswith(line) for full in whole)] == []


def command_lines():
    """Calls of `igeood` in the pages' shell blocks, as lists of words; those of the command line's page are run."""
    for page in PAGES:
        if page.name != "command-line.md":
            for block in re.findall(r"^```sh\n(.*?)^```", text_of(page), re.S | re.M):
                for line in block.replace("\\\n", " ").splitlines():
                    words = shlex.split(re.split(r" > | && ", line)[0], comments=True)
                    if words[:1] == ["igeood"] and len(words) > 1:
                        yield words[1:]


@pytest.mark.parametrize("words", list(command_lines()), ids=" ".join)
def test_every_command_can_be_parsed(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, (name, *rest) = main.get_command(None, words[0]), words
    if isinstance(command, click.Group):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(name, rest)


def test_the_list_of_commands_is_complete():
    page = text_of(ROOT / "docs" / "commands.md")
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
    """Of the addresses that a browser fetches by itself."""
    for page, text in site.items():
        addresses = re.findall(r'<(?:script|img|iframe|source)\b[^>]*?\bsrc=["\']?([^"\'\s>]+)', text)
        addresses += re.findall(r'<link\b[^>]*?\bhref=["\']?([^"\'\s>]+)', text)
        assert addresses, page
        assert [address for address in addresses if re.match(r"(https?:)?//", address)] == [], page


def test_every_public_name_is_in_the_reference(site):
    reference = "".join(text for page, text in site.items() if page.startswith("api"))
    assert [public for public in igeood.__all__ if f'id="igeood.{public}"' not in reference] == []


def test_formulas_of_pages_and_docstrings_are_mathml(site):
    assert site["method.html"].count('class="formula"') >= 13
    assert "<math" in site["api/geometry.html"]
    for page, text in site.items():
        assert not re.search(r":math:|\.\. math::", text), page
        for formula in re.findall(r"<math.*?</math>", text, re.S):
            ElementTree.fromstring(formula)  # noqa: S314 (our own pages)


def test_formulas_in_a_line_are_not_shell_variables_or_code_and_an_unknown_command_is_an_error():
    convert = runpy.run_path(str(ROOT / "docs" / "hooks" / "formulas.py"))["on_page_markdown"]
    for text in ("$A and $B are set", "`$x$`", "```sh\necho $x$\n```", "costs 5$ or 6$"):
        assert convert(text) == text
    assert convert(r"so $\arg\min_y d$.").startswith("so <math")
    with pytest.raises(ValueError, match="does not know"):
        convert(r"$\nosuch$")


def plain(text):
    """Sorted lines, with numbers in their first digits: the last ones differ between machines."""
    return sorted(re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.3g}", text).splitlines())


SERVER = """
import json, os, runpy, signal, socket, sys, traceback
import pyarrow.csv, pyarrow.parquet, sklearn.datasets, sklearn.linear_model, sklearn.model_selection
import igeood.images, igeood.cli, igeood.guard, igeood.tables

def work(folder, program, *words):
    os.chdir(folder)
    sys.path[0], sys.argv = "", [program, *words]
    if program == "igeood":
        igeood.cli.main.main([*words], prog_name=program)
    elif words[0] == "-c":
        exec(words[1], {})
    else:
        runpy.run_path(words[0], run_name="__main__")

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
server = socket.socket(socket.AF_UNIX)
server.bind(chr(0) + sys.argv[1])  # Linux: a name, no file
server.listen()
print("ready", flush=True)
while True:
    client, _ = server.accept()
    message, streams, *_ = socket.recv_fds(client, 1 << 16, 3)
    if os.fork():
        for stream in streams:
            os.close(stream)
        continue
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    code = 0
    try:
        work(*json.loads(message))
    except SystemExit as end:
        code = end.code or 0
    except Exception:
        code = traceback.print_exc() or 1
    sys.stdout.flush()
    client.send(bytes([code]))
    os._exit(0)
"""
CLIENT = """#!{} -SE
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(chr(0) + "{}")
words = [os.getcwd(), os.path.basename(sys.argv[0]), *sys.argv[1:]]
socket.send_fds(server, [json.dumps(words).encode()], [0, 1, 2])
sys.exit(server.recv(1)[0])
"""


@pytest.fixture
def programs(tmp_path):
    """A folder with `igeood` and `python`: a process that has imported torch once forks for each call of them."""
    address = f"igeood-{os.getpid()}"
    for name in ("igeood", "python"):
        (tmp_path / name).write_text(CLIENT.format(sys.executable, address))
        (tmp_path / name).chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", SERVER, address], stdout=subprocess.PIPE) as server:
        assert server.stdout.readline()
        yield tmp_path
        server.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has torch")
def test_the_commands_of_the_page_print_what_it_shows(programs, tmp_path_factory):
    blocks = re.findall(r"```sh\n(.*?)```\n(?:\n```\n(.*?)```)?", text_of(ROOT / "docs" / "command-line.md"), re.DOTALL)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    options = {"cwd": tmp_path_factory.mktemp("page"), "env": environment, "capture_output": True, "text": True}
    assert blocks
    for commands, shown in blocks:
        done = subprocess.run(["/bin/sh", "-ec", f"exec 2>&1\n{commands}"], check=False, **options)
        assert done.returncode == 0, done.stdout
        assert plain(done.stdout) == plain(shown)
