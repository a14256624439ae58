"""The performance model against published measurements, and its speed."""
