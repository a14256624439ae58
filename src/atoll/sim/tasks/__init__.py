"""Simulation of any-to-any models: requests that pass several parts, on executors of their own or shared.

Begin with `simulate_tasks`: a `TaskFleet` (executors, classes, paths, boxes) in, a `TaskResult` out.
`from_plan` makes the fleet of a plan, `mixed_report` joins results with those of plain llms. A request:

1. It comes with a class, lengths of text and numbers of items, all drawn before the run (`task_demand`).
2. It gets a path, in turn or drawn by share, and an executor for every step of it, unless routing is
   dynamic (`task_handover.arrive`). Parts that nothing feeds begin; a fed one when all is there, a streamed
   one with the first chunk. Data between boxes takes turns at both interfaces (`task_handover.carry`).
3. At its executor it waits in the queue of the part, first come, first served. The executor runs one step
   at a time, of its parts with work in turn: a batch of an encoder holds up the tokens of an llm beside it
   (`task_loop.start_next`). All that happens at one time has happened before a step is put together.
4. A batch part takes as many items as fit; denoising lets images in and out between steps; token parts
   batch continuously, with prompts cut to fit (`task_steps`). Results go on whole or in chunks.

Left out: executors that fail or start, prefix caches, back pressure of a full decode part. May import what
`sim` may; compiled functions give the same bits on every run.
"""
