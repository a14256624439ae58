"""Planning and simulation in one loop.

verify  simulate a plan, and plan with more headroom until its promises are kept
rank    value placements by simulating them
"""
