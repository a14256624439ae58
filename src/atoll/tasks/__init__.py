"""Tasks: how the parts of any-to-any models are put together, in plain Python.

Pure: no sockets, no torch. What runs the parts is told through an `Invoker` (`atoll.tasks.invocation`).
"""
