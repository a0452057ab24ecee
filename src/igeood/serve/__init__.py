"""The service: a guard behind HTTP, with dynamic batching, metrics and a monitor (extra `serve`)."""
