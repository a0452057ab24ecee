"""The command line, as a user runs it."""

import subprocess
import sys

import igeood
from igeood.demo import compare, make_digits


def run(*arguments):
    command = [sys.executable, "-m", "igeood.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_does_not_import_torch():
    code = (
        "import sys, igeood.cli; igeood.cli.main(['--help'], standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0
    assert "demo" in found.stdout


def test_version():
    assert run("--version").stdout.strip() == f"igeood, version {igeood.__version__}"


def test_demo_prints_a_table_and_saves_a_guard(tmp_path):
    found = run("demo", "--save", str(tmp_path / "guard.safetensors"))
    assert found.returncode == 0
    assert found.stderr == ""
    for name in (name for name, method in igeood.METHODS.items() if not method.needs_layers):
        assert name in found.stdout
    assert "at least 95%" in found.stdout
    assert igeood.load(tmp_path / "guard.safetensors").calibration.tpr == 0.95


def test_what_the_user_must_mend_is_one_line_and_exit_code_2(tmp_path):
    found = run("demo", "--save", str(tmp_path / "none" / "guard.safetensors"))
    assert found.returncode == 2
    assert found.stderr.startswith("igeood: path: ")
    assert found.stderr.count("\n") == 1


def test_unknown_names_of_the_package():
    assert "black_box" in dir(igeood)
    assert not hasattr(igeood, "white_noise")


def test_the_demo_compares_on_samples_of_its_own():
    data = make_digits(seed=1)
    parts = [data.train, data.held_out, data.test, data.unseen]
    rows = {row.tobytes() for part in parts for row in part}
    assert len(rows) == sum(map(len, parts))
    assert data.accuracy > 0.9
    assert all(noise.auroc > 0.5 for _, noise in compare(data).values())
