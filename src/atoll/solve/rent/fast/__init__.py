"""A plan at once: what each service takes at prices, fitted together, then bettered by moving services.

`kernel` covers one service and deals slices to machines (numba), `ledger` counts what is taken, `picker` asks
for one service, `search` is the heuristic, `templates` makes the few templates that it needs, and `plan` is
the solver called "fast".
"""
