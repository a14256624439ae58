"""The version of Atoll."""

__version__ = "0.2.0"
