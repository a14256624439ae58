"""Deciding: a pure function of what is seen and remembered. No I/O, no clock.

Start reading at `control_view` (everything `decide` is given), then `decide`.

    control_view      View, Memory and ControlPolicy
    decide            the decision, step by step; `situation` puts its input together
    forecast          how much will be asked; `restate` turns that into a problem for the planner
    triggers          reasons to plan now; `plan_judge` says whether a new plan is adopted
    path              the next safe step from what stands to the plan in force
    backoff           failed starts: wait longer each time, set hosts aside
    lane_capacity, machine_pool, route_weights, instance_names   the arithmetic these use
    executor_capacity what executors of any-to-any services carry of a mix of classes

May import `plan`, `core`, the types of `deploy.target`, and `solve.lp` where a linear program is solved.
"""
