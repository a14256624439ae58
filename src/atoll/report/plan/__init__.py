"""Plans for people: in the terminal, as a page, in a notebook. Begin with `show.py`.

    show             any plan: looks its family up in a table, the only place that asks for it
    rented_*         plans on rented nodes: tables for the terminal, data of the page
    cluster_*        plans on a fixed cluster, likewise
    executor_tables  any-to-any services of a plan: executors, classes, paths
    mixes            which models answer the choices of a plan
    *_svg            drawings: layouts of instances, placements, machines with executors

May import what the rest of `report` may.
"""
