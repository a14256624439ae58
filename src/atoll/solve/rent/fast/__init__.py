"""A plan in a fraction of a second: services take what is cheapest at prices, then move while that helps.

Begin with `fast_solver`, the solver called "fast".

fast_solver     problem to plan; a search, and a short integer program where it leaves something to gain
fast_search     the heuristic: fit all services together, then move them
picker          covers a share of one service at prices; `fast_kernel` is the compiled part
market_ledger   nodes and GPUs taken so far, and their cost
fast_templates  the few templates that the heuristic chooses among
fast_cache      capacities and templates on disk

Imports what `rent` may. Nothing is proven here.
"""
