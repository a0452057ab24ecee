"""The library's version, in a module that imports nothing."""

__version__ = "0.3.0"
