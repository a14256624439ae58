"""A plan for people: in the terminal, as a page, in a notebook. `show.py` is the door.

What is shown differs between plans on rented nodes (`rented_*`, with their layouts) and plans on a fixed
cluster (`cluster_*`, with their placements); only `show.py` asks which one a plan is.
"""
