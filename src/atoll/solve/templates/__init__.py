"""Serving templates: the throughput-optimal layout of every small set of nodes.

library   a problem's roles into template libraries
generate  one role: all multisets of nodes, each laid out optimally (`kernel` is the compiled part)
cache     libraries on disk
spectrum  which templates are worth their price
"""
