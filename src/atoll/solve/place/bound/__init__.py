"""Upper bounds on the flow of any placement, and placements that often reach them.

bounds         bounds by compute, coverage, network and covers; begin here
cuts           limits of the network that hold for every placement
lanes          placements of one or two lanes by a small integer program; `lanes_regions` for several regions

Imports `place.flow_instance`, `place.milp` and the modules of `solve` itself.
"""
