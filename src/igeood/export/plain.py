"""Float64 operations that onnxruntime lacks, made of those that it has, and numbers in full precision.

`DECOMPOSITIONS` is for `ExportedProgram.run_decompositions`, `TRANSLATIONS` for `torch.onnx.export`.
"""

import math
from collections.abc import Callable
from typing import Any

import onnx_ir
import torch
from onnxscript import opset20
from torch import Tensor


def _half_angle(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whether |x| > ½; and asin |x| where not, else asin √((1 − |x|)/2): by float32, and one step of Newton's."""
    size = x.abs()
    is_large = size > 0.5
    t = torch.where(is_large, (0.5 - 0.5 * size).clamp(min=0.0).sqrt(), size)
    angle = torch.asin(t.float()).double()
    return is_large, angle + (t - angle.sin()) / angle.cos()


def asin(x: Tensor) -> Tensor:
    """Arc sine."""
    is_large, angle = _half_angle(x)
    return torch.where(is_large, math.pi / 2 - 2.0 * angle, angle) * x.sign()


def acos(x: Tensor) -> Tensor:
    """Arc cosine: exact for values near 1."""
    is_large, angle = _half_angle(x)
    acute = torch.where(is_large, 2.0 * angle, math.pi / 2 - angle)
    return torch.where(x < 0, math.pi - acute, acute)


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """Angle of (x, y); 0 at the origin."""
    is_steep = y.abs() > x.abs()
    longer = torch.maximum(x.abs(), y.abs())
    ratio = torch.minimum(x.abs(), y.abs()) / torch.where(longer > 0, longer, 1.0)
    acute = asin(ratio / (1.0 + ratio * ratio).sqrt())
    acute = torch.where(is_steep, math.pi / 2 - acute, acute)
    return torch.where(x < 0, math.pi - acute, acute) * torch.where(y < 0, -1.0, 1.0)


def log1p(x: Tensor) -> Tensor:
    """log(1 + x) to the last digits: what 1 + x rounds away is in the quotient too."""
    above = 1.0 + x
    rounded = above - 1.0
    return torch.where(rounded == 0, x, above.log() * (x / torch.where(rounded == 0, 1.0, rounded)))


def asinh(x: Tensor) -> Tensor:
    """Inverse hyperbolic sine, up to 1e150."""
    size = x.abs()
    return 0.5 * log1p(2.0 * size * (size + (size * size + 1.0).sqrt())) * x.sign()


def copysign(x: Tensor, sign: Tensor) -> Tensor:
    """|x| with the sign of another value."""
    return torch.where(sign < 0, -x.abs(), x.abs())


def _of_doubles(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """A decomposition for values of float64 alone."""
    return lambda x, *others: function(x, *others) if x.dtype == torch.float64 else NotImplemented


_aten = torch.ops.aten
DECOMPOSITIONS = {
    _aten.acos.default: _of_doubles(acos),
    _aten.asin.default: _of_doubles(asin),
    _aten.asinh.default: _of_doubles(asinh),
    _aten.atan2.default: _of_doubles(atan2),
    _aten.copysign.Tensor: _of_doubles(copysign),
    _aten.log1p.default: _of_doubles(log1p),
    _aten.masked_fill.Scalar: _of_doubles(lambda x, mask, value: torch.where(mask, value, x)),  # not rounded there
}


def scalar_tensor(s: float, dtype: int = onnx_ir.DataType.FLOAT) -> Any:
    """A number in the type it is used in; torch's exporter would round it to float32."""
    if isinstance(s, (int, float)):
        return opset20.Constant(value=onnx_ir.tensor(s, dtype=onnx_ir.DataType(dtype)))  # type: ignore[arg-type]
    return opset20.Cast(s, to=dtype)  # a free length


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {_aten.scalar_tensor.default: scalar_tensor}
