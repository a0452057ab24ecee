"""Float64 operations that onnxruntime lacks."""

import pytest
import torch

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from igeood.export import plain

OPERATIONS = [("asin", 1), ("acos", 1), ("asinh", 1), ("log1p", 1), ("atan2", 2), ("copysign", 2)]


@pytest.mark.parametrize(("name", "arguments"), OPERATIONS)
def test_plain_operations_are_those_of_torch(name, arguments):
    size = torch.logspace(-300, 0, 301 if arguments == 1 else 41, dtype=torch.float64)
    x = torch.cat([-size.flip(0), torch.zeros(1, dtype=torch.float64), size, 1 - size[size < 0.1]])
    x = {"log1p": x[x > -1], "asinh": torch.cat([x, x * 1e10, x * 1e100])}.get(name, x)
    values = [x] if arguments == 1 else torch.cartesian_prod(x, x).T
    torch.testing.assert_close(getattr(plain, name)(*values), getattr(torch, name)(*values), rtol=4e-15, atol=1e-15)
