"""Components: the parts of any-to-any models that run, one file each.

`base` states the interface, `registry` knows them by name. Importing this package loads no weights and no
heavy library; a component's file imports what it needs when it is loaded.
"""
