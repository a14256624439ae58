"""Benchmarks: `python -m benchmarks.NAME [--quick]` prints a table and ends with one line of JSON."""
