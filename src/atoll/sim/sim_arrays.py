"""Everything the event loop reads and writes: one array of records for each noun.

A *unit* is one group of `tp` GPUs of a node: what runs steps. A *graph* has vertices (0 source, then its
members, last the sink) as in `routing.route_tables`: first one for every instance, over its units; then one
for every service, source -> instance -> sink and source -> prefill -> decode instance -> sink. Graphs lie
one after the other: vertex v of graph g is `graph[g].vertex + v`, its edges start at `graph[g].edge`. A
*site* is an end of links: a node, a type of node in a region, or the coordinator there. Times are seconds,
sizes tokens or bytes; KV cache counts in tokens of all the layers that a unit holds. Requests are linked
into lists by `request.after`.

A prompt that is cut into chunks is in several places at once: after the requests lie records that stand for
its chunks but the last, which the request itself is. `request.of` is whose chunk it is.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Longs = NDArray[np.int64]
# Typed by their fields, which mypy does not know.
Records = Any

# States of a request.
NEW, WAITING, PREFILL, MOVING, DECODE, DONE, DROPPED, COMPONENT = range(8)
# What an instance does of a request: its prompt, its answer, or both.
PROMPTS, ANSWERS, ALL = range(3)
# Kinds of event.
STEP, DELIVER, KV_HERE, ARRIVE, LIFE, SAMPLE, POOL = range(7)
# Kinds of life-cycle event.
FAIL, REVIVE, READY, DRAIN, WEIGHTS = range(5)
# Where a unit's step times come from.
OPERATORS, CURVES = range(2)
# How requests are fed.
OPEN, CLOSED, WATERMARK = range(3)
# What has to be looked at after an event.
CLEAN, FREED, CHANGED = range(3)
# Rows of `Sim.unit_bin` and `Sim.service_bin`.
BUSY_S, QUEUED, FILLED = range(3)
ARRIVED, ENDED, TOKENS, WAITED, FLYING = range(5)
# Rows of `Sim.step`, the step being composed: per prompt its tokens, those cached and the layer it comes in
# at; per layer the sequences that come in and what they attend to.
LENGTH, CACHED, ENTRY, SEQUENCES, CONTEXT = range(5)
# Rows of `Sim.todo`: edges with a message to send, units to wake.
TOUCHED, KICKED = range(2)
# Rows of `Sim.curve`.
PROMPT_X, PROMPT_S, DECODE_X, DECODE_S = range(4)
# Columns of `Sim.guess`: the row of `Sim.coefficient` of the model that guesses (-1: none does), its kinds
# of layers and its layers, then the shares of steps in which so many guesses were right.
DRAFT, DRAFT_KINDS, DRAFT_LAYERS, RIGHT = range(4)
# The layout of `Sim.coefficient` (see `times.py`).
DENSE_MAX = 8
LAYER_WIDTH = 4 + 5 * DENSE_MAX + 6 + 6 + 9 + 4 + 3


def make_record(*, i8: str = "", f8: str = "", flag: str = "") -> np.dtype[Any]:
    """A record type with these fields, by the kind of number. One width of each keeps compiled code small."""
    kinds = [(i8, "i8"), (f8, "f8"), (flag, "?")]
    fields = [(name, kind) for names, kind in kinds for name in names.split()]
    return np.dtype(fields, align=True)


RUN = make_record(
    # Settings, see `sim_options.SimOptions`; `path` is the longest pipeline and one, `services` the first
    # service's graph, `nodes` the number of nodes, `waits` the first list of requests that wait for a way,
    # by service, `moves` that of those that wait to decode elsewhere, by instance, `endings` that of those
    # that ended. `requests` are those of the workload, `spare` the list of unused chunks.
    i8="policy after_prompt feed path services nodes waits moves endings bins"
    # Events so far and in the heap, requests that came, were fed, may be fed; what to do after an event.
    " sequence heaped next fed feeds dirty kicks touched moving requests spare block_tokens"
    # Totals.
    " finished lost rejected retries",
    f8="high_water smoothing feed_delay_s feed_mark until_s from_s bin_s startup_s clock_s",
    flag="actual single paired plain",
)
UNIT = make_record(
    # Fixed. `most_*` and `budget` bound a step; where requests start, a `stages`-th of them goes at a time,
    # and each is read for `front_s`, `tokenize_s` more for each token, `stream_s` for each running sequence.
    # One that is `ahead` prepares a step at `begun_s` of the one before. With `prompts_first` sequences wait
    # while there are prompts: they are `held` in the step under way. Prompts are looked at every `interval`
    # steps of decoding, of which it has `skipped` some; one that `collects` looks sooner if they fill a step.
    # A step computes `rows` tokens for each sequence, those that were guessed as row `guess` of `Sim.guess`
    # says (-1: none are). The `ranks` units from `first_rank` on share their experts, and go in step.
    i8="instance node site vertex start end kind row kinds max_sequences max_prompts budget stages"
    " interval skipped rows guess first_rank ranks"
    # The step under way (a list of requests), sequences that run.
    " batch joining steps running owned paced gaps cached_rows"
    # Blocks of prompts that are kept for reuse: the row of `Sim.block` (-1: none are), how many are free to
    # go, and the ends of their list.
    " cache kept oldest newest"
    # The GPU that it has a share of (-1: it has its GPUs alone), and the next unit there.
    " gpu beside"
    # Totals.
    " step_count prompt_tokens decode_tokens",
    # Of what is used and of what waits, `*_moment` is the sum of each change times when it came: x(t) t less
    # that is the integral of x up to t; `*_mark` is what it was at the last sample.
    f8="step_s token_s shared_s back_s front_s stream_s tokenize_s room begun_s step_end last_end used peak"
    " cached_s busy_s batch_sum used_moment used_mark queue_moment queue_mark"
    # What running sequences attend to, the tokens that a step makes of them, and what is left of one.
    " context gain left_over"
    # On a share (`gpu_turns`): how much longer steps take with all shares busy; of a step what is left to
    # compute, and what its host and its launches take.
    " slowdown left_s host_s launch_s",
    flag="solo chunked alive busy ahead computing prompts_first held collects",
)
REQUEST = make_record(
    # `target` is what the prompt pass computes, `context` the tokens a unit holds after this pass, `before`
    # ahead of it; `charged` hops of the pass are counted. `join` is the step at which a solo unit took it in.
    # `over` is the edge it was last sent over, `came_s` when it came to wait for a step; `piece` the tokens
    # of its prompt in this step, that come after `computed`; `service_s` what the prompt alone takes;
    # `gain` the tokens that a step makes of it. Its `blocks` whole blocks are those from `block` of
    # `Sim.block_id` on; while it is `sharing` them they are counted.
    f8="arrival_s came_s start_s first_s last_s end_s sent_s gap_s service_s gain",
    i8="prompt answer target context before computed made after join instance"
    " service klass items hop charged retries level pending state part slot of over piece block blocks",
    flag="marked sharing",
)
LEG = make_record(f8="need", i8="hops")
LIST = make_record(i8="head tail")
ENDING = make_record(i8="step request")
GAP = make_record(i8="step", f8="gap_s")
EDGE = make_record(
    # `reach` is the unit or instance it leads to (-1: sink); `link` what sends, `into` the interface that
    # receives (-1: that costs nothing); then the message being put together.
    i8="target order reach link into head tail",
    f8="weight credit delay latency_s bytes_per_s token_bytes size",
)
VERTEX = make_record(i8="sweep item", f8="queue load booked room speed", flag="dead masked closed")
GRAPH = make_record(i8="vertex edge")
INSTANCE = make_record(
    # `order` is that in which prompts wait; `eager`: admission looks at prompts only.
    i8="vertex part holds tokens after order",
    f8="ready_s gone_s",
    flag="ready draining eager",
)
# `waiting` requests of a service have no way to go on yet; `waiting_moment` as for units.
SERVICE = make_record(
    # `asked` tokens of prompts were begun, of which `reused` were found in a cache.
    i8="layers prompts tokens waiting asked reused",
    f8="estimate kv_bytes gap_sum waiting_moment promise_s",
)
# How many requests use a block on a unit: 0 it is not there, -1 it is there and free to go, the oldest first.
BLOCK = make_record(i8="users older newer")
# A GPU in shares: its first unit, how many compute, and who is done `next` and when, as of `clock_s`.
GPU = make_record(i8="first busy next", f8="clock_s next_s loss")
# Free of KV caches from `free_s` on, of messages from `quick_s` on.
LINK = make_record(f8="bytes_per_s free_s quick_s busy_s bytes")
EVENT = make_record(f8="time", i8="order value")
# `link` is what all messages between two sites share (-1: nothing but the interfaces of the nodes).
SITE = make_record(i8="link", f8="bytes_per_s latency_s")
POOL_TYPE = make_record(i8="server batch head tail", f8="fixed_s item_s")
SERVER = make_record(i8="pool entry items", f8="busy_s", flag="busy")
LEVEL = make_record(i8="step pool")
LIFE_TYPE = make_record(i8="kind target change")
CHANGE = make_record(i8="edge", f8="weight")


_LONG = np.dtype("i8")
_FLOAT = np.dtype("f8")
_SINGLE = np.dtype("f4")


class Sim(NamedTuple):
    """A run: what does not change and what does, by noun; each array with its type and dimensions."""

    run: Annotated[Records, RUN, 1]
    unit: Annotated[Records, UNIT, 1]
    request: Annotated[Records, REQUEST, 1]
    way: Annotated[Longs, _LONG, 2]
    leg: Annotated[Records, LEG, 2]
    list: Annotated[Records, LIST, 1]
    ending: Annotated[Records, ENDING, 2]
    flight: Annotated[Longs, _LONG, 2]
    pace: Annotated[Longs, _LONG, 2]
    gap: Annotated[Records, GAP, 2]
    edge: Annotated[Records, EDGE, 1]
    vertex: Annotated[Records, VERTEX, 1]
    first: Annotated[Longs, _LONG, 1]
    graph: Annotated[Records, GRAPH, 1]
    instance: Annotated[Records, INSTANCE, 1]
    service: Annotated[Records, SERVICE, 1]
    link: Annotated[Records, LINK, 1]
    heap: Annotated[Records, EVENT, 1]
    random: Annotated[Longs, _LONG, 1]
    coefficient: Annotated[Floats, _FLOAT, 3]
    prefix: Annotated[Longs, _LONG, 3]
    curve: Annotated[Floats, _FLOAT, 3]
    guess: Annotated[Floats, _FLOAT, 2]
    site: Annotated[Records, SITE, 2]
    pool: Annotated[Records, POOL_TYPE, 1]
    server: Annotated[Records, SERVER, 1]
    task: Annotated[Longs, _LONG, 1]
    level: Annotated[Records, LEVEL, 1]
    klass: Annotated[Longs, _LONG, 1]
    life: Annotated[Records, LIFE_TYPE, 1]
    change: Annotated[Records, CHANGE, 1]
    step: Annotated[Floats, _FLOAT, 2]
    todo: Annotated[Longs, _LONG, 2]
    unit_bin: Annotated[Singles, _SINGLE, 3]
    service_bin: Annotated[Longs, _LONG, 3]
    gap_count: Annotated[Longs, _LONG, 2]
    gpu: Annotated[Records, GPU, 1]
    block: Annotated[Records, BLOCK, 2]
    block_id: Annotated[Longs, _LONG, 1]


def layout_of(sim: type) -> dict[str, tuple[np.dtype[Any], int]]:
    """Return type and dimensions of every array of a run, as its fields are annotated."""
    hints = get_type_hints(sim, include_extras=True)
    return {name: hint.__metadata__ for name, hint in hints.items()}


LAYOUT = layout_of(Sim)
"""Type and dimensions of every array of a `Sim`."""
WORDS = 4
"""Numbers that tell where an array is: its address and up to three sizes."""
