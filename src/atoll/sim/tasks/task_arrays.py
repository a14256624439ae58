"""Everything the event loop of tasks reads and writes: one array of records for each noun.

A *unit* is a part on an executor. A *job* is what a request wants of a part; the jobs of request r are
`request[r].job` and following, one for each part of its class, of which those on its path are `active`.
Times are seconds, KV cache and lengths tokens. Paths and executors are chosen in one graph, read as in
`routing.decisions`: a vertex for every class, with an edge to each of its paths, and one for every step of a
path, with an edge to each of its executors.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np

from atoll.sim.sim_arrays import EVENT, Floats, Longs, Records, layout_of, make_record

# Kinds of unit.
BATCHES, DENOISES, TOKENS = range(3)
# Phases of a unit that makes tokens.
BOTH, PREFILL, DECODE = range(3)
# What a unit makes that the request wants.
NOTHING, TEXT, AUDIO, IMAGE = range(4)
# Routing.
DRAWN, DEALT, DYNAMIC = range(3)
# Kinds of event: a step ends on an executor; a job that nothing feeds may begin; all of an edge has arrived,
# that was not streamed or was; a chunk has arrived; a KV cache that was computed here is where it is wanted.
STEP, READY, FED, CLOSED, CHUNK, GONE = range(6)
JOBS = 1 << 28
"""More than there are jobs: endings are sorted by step * JOBS + job, so that no two are equal."""


RUN = make_record(
    i8="sequence heaped next requests finished kicks routing gave_way queries",
    # The control plane answers one query after the other and is busy until `control_s`.
    # Requests come until `asked_s`; times that end in `asked_s` are what falls before it.
    f8="clock_s until_s asked_s query_s control_s",
)
# Its units are `first` and `count` - 1 more; `turn` had the last step, `at` has the one under way. `work_s`
# are seconds of work that was sent to it and is not done, as routing estimates them.
EXECUTOR = make_record(
    i8="box group first count turn at", f8="work_s busy_s step_end_s slowed", flag="busy kicked"
)
UNIT = make_record(
    # Fixed; those from `kind` to `cached_rows` are for `sim.stepping`.
    i8="executor type phase emits most budget kind row kinds start end cached_rows"
    # Jobs that wait, those whose prompt is being computed, and those in the batch: ends of lists.
    " head tail prompt_head prompt_tail batch"
    # Sequences or images that run, what sequences attend to, steps so far; prompts under way and in the step.
    " running context steps prompting pieces"
    # Jobs in the list that waits; totals.
    " waiting step_count prompt_tokens decode_tokens",
    # `work_*_s` estimate the seconds of a prompt token, a token and an item beside its own.
    f8="fixed_s room step_s token_s shared_s cached_s work_prompt_s work_answer_s work_item_s"
    " running_s used peak busy_s busy_asked_s batch_sum used_moment queue_moment",
    flag="eager",
)
JOB = make_record(
    # `after` in the lists of jobs that wait or compute their prompt, `beside` in that of the batch.
    i8="request part unit after beside"
    # Items: all, those that may be taken, in the batch, and done; steps of denoising each.
    " items ready taken done steps"
    # Tokens: `target` of the prompt pass, `computed` so far, `piece` in this step; `made` of the answer;
    # the step `join` at which it began to run, and the `mark` in its answer where something happens next.
    " prompt answer target computed piece made join mark chunk"
    # Edges whose data is not all there, and edges of which there is nothing yet.
    " feeders starts",
    # When it might begin, and when it was finished.
    f8="work_s known_s held begin_s finish_s",
    flag="active queued chunked begun worked finished",
)
REQUEST = make_record(
    i8="klass path job edge left tokens retries",
    f8="arrival_s end_s first_text_s last_text_s first_audio_s last_audio_s image_s",
)
KLASS = make_record(i8="part parts edge edges vertex")
# A part of a class: the edges it feeds (within those of the class, which are sorted by their source), and
# the units that can run it.
PART = make_record(i8="name type edge edges option options")
LINK = make_record(i8="src dst chunk", flag="streamed")
PATH = make_record(i8="member members")
MEMBER = make_record(i8="vertex part")
CHOICE = make_record(i8="target order", f8="weight credit")
VERTEX = make_record(flag="closed")
ENDING = make_record(i8="step request")
BOX = make_record(
    f8="bytes_per_s latency_s inner_bytes_per_s inner_latency_s out_s in_s"
    " out_busy_s in_busy_s out_asked_s in_asked_s"
)
PAIR = make_record(f8="bytes_per_s latency_s free_s")


_LONG = np.dtype("i8")
_FLOAT = np.dtype("f8")


class TaskSim(NamedTuple):
    """A run: what does not change and what does, by noun; each array with its type and dimensions."""

    run: Annotated[Records, RUN, 1]
    executor: Annotated[Records, EXECUTOR, 1]
    unit: Annotated[Records, UNIT, 1]
    job: Annotated[Records, JOB, 1]
    request: Annotated[Records, REQUEST, 1]
    klass: Annotated[Records, KLASS, 1]
    part: Annotated[Records, PART, 1]
    link: Annotated[Records, LINK, 1]
    path: Annotated[Records, PATH, 1]
    member: Annotated[Records, MEMBER, 1]
    choice: Annotated[Records, CHOICE, 1]
    vertex: Annotated[Records, VERTEX, 1]
    first: Annotated[Longs, _LONG, 1]
    # By executor and name of a part: the unit, -1 where there is none.
    unit_of: Annotated[Longs, _LONG, 2]
    option: Annotated[Longs, _LONG, 1]
    # By unit and class: seconds of an item.
    item_s: Annotated[Floats, _FLOAT, 2]
    # By edge of a request: bytes.
    size: Annotated[Floats, _FLOAT, 1]
    box: Annotated[Records, BOX, 1]
    # By sender and receiver, of boxes; nothing where no two of them have a link of their own.
    pair: Annotated[Records, PAIR, 2]
    heap: Annotated[Records, EVENT, 1]
    # By unit: who leaves the batch, or is due a chunk, at which of its steps.
    ending: Annotated[Records, ENDING, 2]
    todo: Annotated[Longs, _LONG, 1]
    random: Annotated[Longs, _LONG, 1]
    # Rows as in `sim.sim_arrays`: tokens of each prompt in the step, and those it has already.
    step: Annotated[Floats, _FLOAT, 2]
    coefficient: Annotated[Floats, _FLOAT, 3]
    prefix: Annotated[Longs, _LONG, 3]
    curve: Annotated[Floats, _FLOAT, 3]


LAYOUT = layout_of(TaskSim)
"""Type and dimensions of every array of a `TaskSim`."""
