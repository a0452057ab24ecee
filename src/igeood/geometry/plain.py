"""Plain mode: the same formulas without a decision that depends on values, in functions that every runtime has.

A graph that is traced, such as one of ONNX, cannot branch, loop over rows, or treat rare values apart. In plain mode
functions take all rows at once and compute what they would otherwise decide. Runtimes of ONNX have no inverse
trigonometric functions in float64, and its exporter rounds plain numbers to float32: plain mode replaces both.
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_is_plain = ContextVar("is_plain", default=False)


def is_plain() -> bool:
    """Whether this thread is in plain mode."""
    return _is_plain.get()


@contextmanager
def plain() -> Iterator[None]:
    """Plain mode, in this thread."""
    token = _is_plain.set(True)
    try:
        with _Doubles():
            yield
    finally:
        _is_plain.reset(token)


class _Doubles(TorchFunctionMode):
    """Replaces functions of float64 tensors that runtimes lack, and numbers that float32 cannot hold."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # fmt: skip
        del types
        name, named = getattr(func, "__name__", ""), dict(kwargs or {})
        like = next((value for value in (*args, *named.values()) if _is_double(value)), None)
        if like is None:
            return func(*args, **named)
        rounds = _is_number if name.startswith("clamp") else _is_rounded  # a clamp's ends are both tensors, or neither
        args = tuple(_number(value, like) if rounds(value) else value for value in args)
        named = {key: _number(value, like) if rounds(value) else value for key, value in named.items()}
        replaced = _REPLACED.get(name.removesuffix("_"))
        if replaced is None:
            return func(*args, **named)
        result = replaced(*args)
        return args[0].copy_(result) if name.endswith("_") else result


def _is_double(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_rounded(value: Any) -> bool:
    """Whether float32 cannot hold a number."""
    if not isinstance(value, float) or not math.isfinite(value):
        return False
    try:
        return bool(struct.unpack("f", struct.pack("f", value))[0] != value)
    except OverflowError:
        return True


def _number(value: float, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=like.device)


def _half_angle(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whether |x| > ½; and asin |x| where not, else asin √((1 − |x|)/2): by float32, and one step of Newton's."""
    size = x.abs()
    is_large = size > 0.5
    t = torch.where(is_large, (0.5 - 0.5 * size).clamp(min=0.0).sqrt(), size)
    angle = torch.asin(t.float()).double()
    return is_large, angle + (t - angle.sin()) / angle.cos()


def asin(x: Tensor) -> Tensor:
    """Arc sine of float64 values."""
    is_large, angle = _half_angle(x)
    return torch.where(is_large, _number(math.pi / 2, x) - 2.0 * angle, angle) * x.sign()


def acos(x: Tensor) -> Tensor:
    """Arc cosine of float64 values: exact for those near 1."""
    is_large, angle = _half_angle(x)
    acute = torch.where(is_large, 2.0 * angle, _number(math.pi / 2, x) - angle)
    return torch.where(x < 0, _number(math.pi, x) - acute, acute)


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """Angle of (x, y), float64; 0 at the origin."""
    tall, most = y.abs() > x.abs(), torch.maximum(x.abs(), y.abs())
    ratio = torch.minimum(x.abs(), y.abs()) / torch.where(most > 0, most, 1.0)
    acute = asin(ratio / (1.0 + ratio * ratio).sqrt())
    acute = torch.where(tall, _number(math.pi / 2, x) - acute, acute)
    return torch.where(x < 0, _number(math.pi, x) - acute, acute) * torch.where(y < 0, -1.0, 1.0)


def log1p(x: Tensor) -> Tensor:
    """log(1 + x) of float64 values, to the last digits: what 1 + x rounds away is in the quotient too."""
    above = 1.0 + x
    rounded = above - 1.0
    return torch.where(rounded == 0, x, above.log() * (x / torch.where(rounded == 0, 1.0, rounded)))


def asinh(x: Tensor) -> Tensor:
    """Inverse hyperbolic sine of float64 values, up to 1e150."""
    size = x.abs()
    return 0.5 * log1p(2.0 * size * (size + (size * size + 1.0).sqrt())) * x.sign()


def copysign(x: Tensor, sign: Tensor) -> Tensor:
    """|x| with the sign of another value."""
    return torch.where(sign < 0, -x.abs(), x.abs())


_REPLACED: dict[str, Callable[..., Tensor]] = {
    "acos": acos, "arccos": acos, "arcsin": asin, "arcsinh": asinh, "arctan2": atan2, "asin": asin, "asinh": asinh,
    "atan2": atan2, "copysign": copysign, "log1p": log1p,
}  # fmt: skip
