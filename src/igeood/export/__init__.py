"""A guard as one ONNX graph, which runs without Python and torch: model, score, p-value and verdict."""

from igeood.errors import MissingExtraError

try:
    import onnxruntime  # noqa: F401
    import onnxscript  # noqa: F401
except ImportError as error:
    raise MissingExtraError(f"{error.name} is needed", cure="pip install 'igeood[onnx]'") from error

from igeood.export.writing import export

__all__ = ["export"]
