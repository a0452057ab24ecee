"""A guard as one ONNX graph, which runs without Python and torch: model, score, p-value and verdict."""

from igeood.errors import MissingExtraError

try:
    from igeood.export.writing import export
except ModuleNotFoundError as error:
    raise MissingExtraError(f"{error.name} is needed", cure="pip install 'igeood[onnx]'") from error

__all__ = ["export"]
