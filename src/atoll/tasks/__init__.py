"""Tasks: how the parts of any-to-any models are put together, in plain Python.

Begin with `task` (units run one component, composites call units) and `run` (a request carried out).

    recording, entry, forms     what a task asked for, checked every time its code runs again
    task_asker, invocation, pending  whom task code asks, one run of a component, values still to come
    feed, cutting, mapping      streams: read by many, cut into pieces, a component run on every piece
    flow, sketch, flow_text     what flows in a task, found by following its code
    values, array_leases        plain data and handles, and who still needs which array
    library/                    tasks that come with Atoll

Pure: no sockets, no torch. What runs the parts is told through an `Invoker` (`atoll.tasks.invocation`). May
import `core` alone.
"""
