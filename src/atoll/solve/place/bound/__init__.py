"""Bounds on flow placements: cuts, their proof, and lanes that often reach them."""
