"""What comes in with the first line of a user's script."""

import subprocess
import sys

HEAVY = (
    "scipy",
    "sklearn",
    "pyarrow",
    "matplotlib",
    "optuna",
    "pandas",
    "PIL",
    "click",
    "torchvision",
    "pooch",
    "igeood.bench",
)


def test_heavy_parts_come_in_when_first_used():
    """Torch, NumPy and safetensors are all that the guards' own modules import."""
    code = (
        "import sys, igeood\n"
        "assert 'torch' not in sys.modules\n"
        "igeood.black_box, igeood.grey_box, igeood.white_box, igeood.load, igeood.extract\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[]"
