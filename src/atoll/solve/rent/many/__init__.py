"""Renting where services are so many that programs over all their instances take too long.

fluid_program      the relaxation over parts of instances: one linear program, and its prices
share_search       the largest common share by local search, and less rent for it
share_tables       what that reads and changes; `share_kernel` is its compiled inner loop
market_capacities  what there is of a market, as sums that must not be exceeded
"""
