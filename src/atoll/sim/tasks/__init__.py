"""Simulation of any-to-any models: requests that pass several parts, on executors of their own or shared.

    fleet = TaskFleet(executors, classes, paths, boxes)
    result = simulate_tasks(fleet, requests=2000, seed=0)

What happens to a request, in order:

1. It comes with a class, lengths of text and numbers of items, all drawn before the run (`demand`).
2. It gets a path: dealt in turn or drawn by share; and an executor for every step of it, unless routing is
   dynamic (`handover.arrive`).
3. Parts that nothing feeds begin. A part that is fed begins when all is there, a streamed one when the first
   chunk is. Data between boxes takes turns at both interfaces (`handover.carry`).
4. At its executor it waits in the queue of the part, first come, first served. The executor runs one step
   at a time, of its parts with work in turn: so a batch of an encoder holds up the tokens of an llm beside
   it (`loop.start_next`). All that happens at one time has happened before a step is put together.
5. A batch part takes as many items as fit in a batch; denoising lets images in and out between steps; token
   parts batch continuously, with prompts cut to fit (`steps`).
6. What a part has made goes to those that it feeds, whole or in chunks; one that is streamed to is done no
   sooner than what feeds it. With its last part done the request is finished.

What is left out: executors that fail or start; prefix caches; a decode part that is full does not hold up
what is sent to it; a talker that is streamed to is never held up by a slow llm in the middle of its answer.
"""
