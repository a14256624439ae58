"""The small vocabulary everything else is written in: units, errors, files, ids.

Begin with `units` ("1600ms" into seconds) and `errors` (one line and an exit code for every failure).

    units, quantities    reading and writing quantities, and pydantic fields that hold the base unit
    errors, files, paths failures, files read and written whole, and where Atoll keeps them
    ids, graph, frozen   names of things, a model as a graph of components, base of JSON values
    request_parameters   parameters of requests that generate text, each declared once
    options              fields that are also options of commands
    bucket, rng          token buckets, named random streams
    compiling, linking   numba: compile once on a machine, link compiled parts into entries
    listener, waiting    who is told what a long operation does
    extras, version      optional packages, and the version

Imports nothing else of Atoll.
"""
