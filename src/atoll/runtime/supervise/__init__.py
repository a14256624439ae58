"""Processes that are kept running: when to start and stop them, and how none outlives its parent.

agent        keeps the engine processes of a machine running
supervision  what to do with one process: pure
process      starting one, guarded; guard and nursery run beside it
forker       the agent's side of a nursery, which it keeps running
"""
