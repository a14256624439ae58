"""The choice problem by exchanging the few pairs that are open: our heuristic."""
