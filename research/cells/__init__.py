"""The exact mixture of cells, and how far a paper's algorithm is from it."""
