"""A guard's graph in JavaScript: Node.js and a real browser say what Python says; the example's page shows it."""

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import igeood

pytest.importorskip("onnxscript", reason="onnxscript is not installed: the extra `onnx` has it")

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "browser"
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


@pytest.fixture(scope="module")
def packages(needs):
    needs((EXAMPLE / "node_modules").is_dir(), "what `npm ci --ignore-scripts --prefix examples/browser` fetches")


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


@pytest.fixture
def node(needs, guarded):
    """Runs a program in the guard's folder; returns what it prints."""
    needs(shutil.which("node"), "Node.js")

    def run(*words):
        command = ["node", *words]
        done = subprocess.run(command, cwd=guarded[0], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_node_gives_the_same_verdicts(guarded, node):
    _, guard, x = guarded
    printed = node("node.mjs", "guard.onnx", "inputs.f32", "3,8,8")
    agree([json.loads(line) for line in printed.splitlines()], guard, x)


def test_the_documentations_javascript_runs(guarded, node):
    folder, _, _ = guarded
    page = (EXAMPLE.parent.parent / "docs" / "export.md").read_text(encoding="utf-8")
    (folder / "page.mjs").unlink()
    (folder / "page.mjs").write_text(re.search(r"```js\n(.*?)```", page, re.S)[1])
    assert re.match(r"(true|false) 0\.\d+ -?\d+\n$", node("page.mjs"))
    (folder / "page.mjs").unlink()
    (folder / "page.mjs").symlink_to(EXAMPLE / "page.mjs")


def test_a_browser_gives_the_same_verdicts(guarded, open_page, file_server):
    folder, guard, x = guarded
    (folder / "samples").mkdir()
    (folder / "samples" / "names.json").write_text("[]")
    with file_server(folder) as address:
        agree(open_page(address, is_strict=False).evaluate(IN_PAGE, list(x.shape[1:])), guard, x)


def test_the_page_judges_its_samples_and_pictures_of_ones_own(packages, open_page, file_server, tmp_path, capsys):
    folder = site(tmp_path)
    runpy.run_path(str(EXAMPLE / "make_guard.py"))["main"](folder)
    printed = re.search(r"([\d.]+)% of the digits.*?([\d.]+)% of 8", capsys.readouterr().out)
    known, foreign = map(float, printed.groups())
    assert known < 12
    assert foreign > 60
    with file_server(folder) as address:
        for width in (390, 1280):
            page = open_page(address, width, is_strict=False)
            page.get_by_text("Ready: pictures are resized to 8 × 8 pixels.").wait_for(timeout=60_000)
            page.locator("li").nth(11).wait_for(timeout=60_000)
            assert page.locator("li.known b").first.text_content().startswith("a ")
            assert page.locator("li", has_text="noise.png").get_attribute("class") == "foreign"
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.set_input_files("#files", [folder / "samples" / "digit-3.png", EXAMPLE / "README.md"])
            page.get_by_text("README.md cannot be read").wait_for()
            assert page.locator("li").count() == 13
