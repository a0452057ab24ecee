"""A guard as one ONNX graph, which runs without Python and torch: model, score, p-value and verdict."""
