"""Deciding: what is seen and remembered, and what to do about it. No I/O, no clock."""
