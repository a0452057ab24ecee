"""The command line as a whole, as a user runs it."""

import subprocess
import sys

import igeood


def run(*arguments):
    command = [sys.executable, "-m", "igeood.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_does_not_import_torch():
    code = (
        "import sys, igeood.cli as c\n"
        "for name in [None, *c.main.commands]:\n"
        "    c.main([*filter(None, [name]), '--help'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    for command in ("demo", "fit", "tune", "calibrate", "score", "bench"):
        assert f"  {command} " in found.stdout


def test_version():
    assert run("--version").stdout.strip() == f"igeood, version {igeood.__version__}"


def test_what_the_user_must_mend_is_one_line_and_exit_code_2(tmp_path):
    found = run("fit", "none.parquet", "--out", str(tmp_path / "none" / "guard.safetensors"))
    assert found.returncode == 2
    assert found.stderr.startswith("igeood: out: ")
    assert found.stderr.count("\n") == 1


def test_unknown_names_of_the_package():
    assert "black_box" in dir(igeood)
    assert not hasattr(igeood, "white_noise")
