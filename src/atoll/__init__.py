"""Atoll: one service for many models on a pile of different GPUs."""

__version__ = "0.1.0"
