"""What comes in with the first line of a user's script."""

import subprocess
import sys

HEAVY = ("scipy", "sklearn", "pyarrow", "matplotlib", "optuna", "pandas", "PIL", "click", "torchvision", "pooch")


def test_heavy_parts_come_in_when_first_used():
    """Torch, NumPy and safetensors are all that guards and the monitor import."""
    code = (
        "import sys, igeood\n"
        "assert 'torch' not in sys.modules\n"
        "igeood.black_box, igeood.grey_box, igeood.white_box, igeood.load, igeood.extract, igeood.Monitor\n"
        f"print([name for name in {(*HEAVY, 'igeood.bench')} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
