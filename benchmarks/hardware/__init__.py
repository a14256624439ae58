"""Measurements on one NVIDIA H200, and what the models say of them."""
