"""Sharper bounds and better mixes where machines are scarce.

The oracles of `service_oracle` let a service take any number of nodes, and prices hold it back on average
only. Here a service keeps within the nodes there are. Begin with `tighten` in `capped_oracle`.

capped_oracle  oracles that count scarce cells whole, and column generation with them
capped_cover   the compiled table behind them
"""
