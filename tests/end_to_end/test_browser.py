"""A guard's graph in JavaScript: Node.js and a real browser say what Python says; the example's page shows it."""

import functools
import http.server
import json
import os
import re
import runpy
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import sync_playwright

import igeood

pytest.importorskip("onnxscript", reason="onnxscript is not installed: the extra `onnx` has it")

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "browser"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FILES = ("index.html", "judge.mjs", "node.mjs", "package.json", "page.mjs", "node_modules")
SAMPLES = 300
IN_PAGE = """async shape => {
  const ort = await import("/node_modules/onnxruntime-web/dist/ort.wasm.min.mjs");
  const { judge } = await import("/judge.mjs");
  ort.env.wasm.numThreads = 1;
  const session = await ort.InferenceSession.create("/guard.onnx");
  const values = new Float32Array(await (await fetch("/inputs.f32")).arrayBuffer());
  return judge(ort, session, values, shape);
}"""


def needs(there, what):
    """Skip without something that is not ours to install; where a browser is required, fail."""
    if not there and os.environ.get("IGEOOD_BROWSER") != "required":
        pytest.skip(f"{what}: the graph is not tried in JavaScript")
    assert there, f"{what}, and IGEOOD_BROWSER=required"


@pytest.fixture(scope="module")
def packages():
    needs((EXAMPLE / "node_modules").is_dir(), "run `npm ci --ignore-scripts --prefix examples/browser` first")


def site(folder):
    """The example's files in a folder of their own."""
    for name in FILES:
        (folder / name).symlink_to(EXAMPLE / name)
    return folder


@pytest.fixture(scope="module")
def guarded(packages, model, data, tmp_path_factory):
    """A site with a guard and inputs of it, and the guard's verdict on them."""
    folder = site(tmp_path_factory.mktemp("guarded"))
    guard = igeood.white_box(model).fit(data.train).calibrate(data.held_out)
    x = data.images(SAMPLES // 2, 8)[0], data.images(SAMPLES // 2, 9, flipped=True)[0]
    x = np.concatenate([part.numpy() for part in x]).astype("<f4")
    guard.export(folder / "guard.onnx", example=x[:4])
    x.tofile(folder / "inputs.f32")
    return folder, guard, x


def agree(verdicts, guard, x):
    expected = guard.predict(x)
    assert 0.1 * len(x) < expected.is_ood.sum() < 0.9 * len(x)
    np.testing.assert_allclose([one["score"] for one in verdicts], expected.score, rtol=1e-4, atol=1e-4)
    assert [one["isOod"] for one in verdicts] == expected.is_ood.tolist()
    assert [one["label"] for one in verdicts] == expected.label.tolist()
    np.testing.assert_allclose([one["pValue"] for one in verdicts], expected.p_value, atol=3 / 401)


@pytest.fixture(scope="module")
def browser():
    needs(CHROMIUM is not None, "Chromium is missing")
    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def visit(browser):
    """Opens a page of a folder; what is asked of other hosts fails the test, and so does an error in the page."""
    servers, troubles, pages = [], [], []

    def opened(folder, width=1280):
        handler = functools.partial(Quiet, directory=str(folder))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        page = browser.new_page(viewport={"width": width, "height": 900})
        pages.append(page)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        own = (address, "blob:", "data:")
        page.on("request", lambda asked: None if asked.url.startswith(own) else troubles.append(asked.url))
        page.goto(address)
        return page

    yield opened
    for page in pages:
        page.close()
    for server in servers:
        server.shutdown()
        server.server_close()
    assert troubles == []


def test_node_gives_the_same_verdicts(guarded):
    folder, guard, x = guarded
    needs(shutil.which("node"), "Node.js is missing")
    command = ["node", "node.mjs", "guard.onnx", "inputs.f32", "3,8,8"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    agree([json.loads(line) for line in done.stdout.splitlines()], guard, x)


def test_the_documentations_javascript_runs(guarded):
    folder, _, _ = guarded
    needs(shutil.which("node"), "Node.js is missing")
    page = (EXAMPLE.parent.parent / "docs" / "export.md").read_text(encoding="utf-8")
    (folder / "page.mjs").unlink()
    (folder / "page.mjs").write_text(re.search(r"```js\n(.*?)```", page, re.S)[1])
    command = ["node", "page.mjs"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(r"(true|false) 0\.\d+ -?\d+\n$", done.stdout)
    (folder / "page.mjs").unlink()
    (folder / "page.mjs").symlink_to(EXAMPLE / "page.mjs")


def test_a_browser_gives_the_same_verdicts(guarded, visit):
    folder, guard, x = guarded
    (folder / "samples").mkdir()
    (folder / "samples" / "names.json").write_text("[]")
    page = visit(folder)
    agree(page.evaluate(IN_PAGE, list(x.shape[1:])), guard, x)


def test_the_page_judges_its_samples_and_pictures_of_ones_own(packages, visit, tmp_path, capsys):
    folder = site(tmp_path)
    runpy.run_path(str(EXAMPLE / "make_guard.py"))["main"](folder)
    printed = re.search(r"([\d.]+)% of the digits.*?([\d.]+)% of 8", capsys.readouterr().out)
    known, foreign = map(float, printed.groups())
    assert known < 12
    assert foreign > 60
    for width in (390, 1280):
        page = visit(folder, width)
        page.get_by_text("Ready: pictures are resized to 8 × 8 pixels.").wait_for(timeout=60_000)
        page.locator("li").nth(11).wait_for(timeout=60_000)
        assert page.locator("li.known b").first.text_content().startswith("a ")
        assert page.locator("li", has_text="noise.png").get_attribute("class") == "foreign"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.set_input_files("#files", [folder / "samples" / "digit-3.png", EXAMPLE / "README.md"])
        page.get_by_text("README.md cannot be read").wait_for()
        assert page.locator("li").count() == 13
        page.screenshot(path=tmp_path / f"page-{width}.png", full_page=True)
