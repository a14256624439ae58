"""The planner: answers in the console's process what is asked about plans (docs/reference/http.md).

Begin with `planner_api`: it finds the `PlannerRoute` of a request by method and path, and refuses whoever
may not ask. The handler gets the `PlanningService` (fleets, jobs, plans) and the `PlannerRequest`, both in
`planner_service`. Whatever takes time is a job: a plain function in a worker process, whose progress and
result are server-sent events.

    *_pages                                  the handlers, with the types of what they take and give
    fleets, plans, source, answers           fleets and plans that it knows, uploads, answers kept
    questions, whatif, change, dials         what-if questions: the change asked for, what it costs
    plan_simulation, trace_store             a plan under a trace, and the traces there are
    plan_drawing, drawn_plan                 a plan as data to draw; its types
    jobs, worker                             worker processes and their queue

May import the API and all that plans and simulates, and `runtime.http`; nothing that serves models.
"""
