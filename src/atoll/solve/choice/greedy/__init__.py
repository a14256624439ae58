"""The paper's heuristics: GH and AGH."""
