"""The desk: a small service that answers what pages and programs ask about plans (docs/reference/http.md).

A request comes in at `server`, which finds its `DeskRoute` by method and path, and refuses whoever may not
ask. What answers it gets the `PlanDesk` (its state: fleets, jobs, plans) and the `DeskRequest`. Whatever
takes time is a job (`jobs`): a plain function in a worker process, whose progress and result are server-sent
events.
"""
