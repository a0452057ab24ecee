"""What the documentation shows is true: its Python runs and prints what it says, links lead somewhere, it builds."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import igeood

ROOT = Path(__file__).parent.parent
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "reproduction")
WRITTEN = [*PAGES, *sorted(ROOT.glob("*.md")), ROOT / "examples" / "README.md"]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```)?", re.S | re.M)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def text_of(path):
    return path.read_text(encoding="utf-8")


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [path for path in PAGES if BLOCK.search(text_of(path))], ids=name)
def test_python_blocks_run_in_order_and_print_what_the_page_says(page, reader_names, tmp_path, monkeypatch, capsys):
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
import igeood.bench.inputs, igeood.cli, igeood.guard, igeood.tables

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
