"""The simulator: how fast it is, and how near to real engines."""
