"""A plan on this machine: its nodes as processes, its instances as endpoints, a gateway in front.

weights  which weights a plan needs, and whether these are them
placing  which endpoints, with which layer ranges of the model that is served here
cores    which cores each process gets
build    configurations and endpoints, through the adapters
fleet    starting, watching and stopping all of it
"""
