"""Max flow of a placement, kept up to date while single nodes move (numba).

Graph. Node i is an arc in_i -> out_i of capacity rate[i, held layers]. Nodes are split into groups
inside which no link can bind; inside a group everything that ends at layer x meets in a hub (x, group),
and everything that may be entered at x leaves from it, without limit. Links between groups are single
arcs of their own capacity. With all links wide there is one group, and the graph is a small DAG over
layer boundaries; with none there are n groups and it is the graph as written in the issue.

Capacities are integers: tokens/s times a power of two, so a flow is exact and no rounding gathers
however many moves are made. When a node moves, the flow through it is cancelled path by path, the node
is put elsewhere, and augmenting paths restore a maximum. Every change of a flow is written to a log, so
a rejected move is undone at the price of what it changed.

Inner functions take plain arrays: taking a field out of a tuple costs a counted reference each time.

Bound. Every token passes layer l on a node that holds it, so the flow is at most the summed capacity of
the holders of any one layer (`cover`). That rejects most bad moves before any flow is touched.
"""

from __future__ import annotations

from atoll.core.compiling import lean_part
from atoll.solve.array_types import Ints, Small
from atoll.solve.place.search.flow_tables import FlowState, Tables

# Slots of `FlowState.number`: the flow, how much is logged, the number of the last search, and the work done
# since the state was made: vertices reached and arcs looked at, which is what a search pays for.
VALUE, LOGGED, STAMP, WORK = 0, 1, 2, 3
# Room of an arc without limit: far above the 2**50 units that all capacities are scaled to.
_FREE = 1 << 62


@lean_part
def _add(flow: Ints, number: Ints, log_at: Small, log_by: Ints, at: int, by: int) -> None:
    """Change one flow and log it."""
    flow[at] += by
    count = number[LOGGED]
    # Past the end of the log only the count goes on, so a reader of the log can see that it is not complete.
    if count < log_at.shape[0]:
        log_at[count] = at
        log_by[count] = by
    number[LOGGED] = count + 1


@lean_part
def _link(head: Small, after: Small, back: Small, hub: int, item: int) -> None:
    """Put an item at the front of a hub's list."""
    old = head[hub]
    after[item] = old
    back[item] = -1
    if old >= 0:
        back[old] = item
    head[hub] = item


@lean_part
def _unlink(head: Small, after: Small, back: Small, hub: int, item: int) -> None:
    """Take an item out of a hub's list."""
    right, left = after[item], back[item]
    if left >= 0:
        after[left] = right
    else:
        head[hub] = right
    if right >= 0:
        back[right] = left


@lean_part
def _enlist(tables: Tables, state: FlowState, i: int) -> None:
    """Put node i into the lists of the hubs it touches and add its capacity to `cover`."""
    s, e = state.start[i], state.end[i]
    if e <= s:
        return
    g, groups, width = tables.group[i], tables.groups, tables.width
    cover = state.cover
    rate = tables.rate[i, e - s]
    for layer in range(s, e):
        cover[layer] += rate
    head, after, back = state.entry_head, state.entry_next, state.entry_back
    # One entry per layer at which the node may be entered: only the first `width` layers of its range count.
    for offset in range(min(width, e - s)):
        _link(head, after, back, (s + offset) * groups + g, i * width + offset)
    _link(state.exit_head, state.exit_next, state.exit_back, e * groups + g, i)


@lean_part
def _delist(tables: Tables, state: FlowState, i: int) -> None:
    """Undo `_enlist`."""
    s, e = state.start[i], state.end[i]
    if e <= s:
        return
    g, groups, width = tables.group[i], tables.groups, tables.width
    cover = state.cover
    rate = tables.rate[i, e - s]
    for layer in range(s, e):
        cover[layer] -= rate
    head, after, back = state.entry_head, state.entry_next, state.entry_back
    for offset in range(min(width, e - s)):
        _unlink(head, after, back, (s + offset) * groups + g, i * width + offset)
    _unlink(state.exit_head, state.exit_next, state.exit_back, e * groups + g, i)


@lean_part
def _down(
    i: int,
    path: Small,
    flow: Ints,
    end: Ints,
    group: Ints,
    groups: int,
    width: int,
    entry_head: Small,
    entry_next: Small,
) -> int:
    """Follow flow from node i to the sink; write the flow slots of the path and return how many."""
    n = end.shape[0]
    pairs = (4 + width) * n
    count = 0
    # Slots of `flow`, n each: from source, to sink, through a node, into its hub, then `width` entries a
    # node.
    while flow[n + i] <= 0:
        base = end[i] * groups
        # A hub mixes flows: any entry of it that carries some continues the path, whichever node it came
        # from.
        if flow[3 * n + i] > 0:
            entry = entry_head[base + group[i]]
            while flow[4 * n + entry] <= 0:
                entry = entry_next[entry]
            path[count] = 3 * n + i
            path[count + 1] = 4 * n + entry
            count += 2
            i = entry // width
        else:
            # Nothing goes to the own hub, so what leaves node i is on a single arc to a node of another
            # group.
            g = 0
            found = -1
            while found < 0:
                entry = entry_head[base + g] if g != group[i] else -1
                while entry >= 0 and flow[pairs + i * n + entry // width] <= 0:
                    entry = entry_next[entry]
                if entry >= 0:
                    found = entry // width
                g += 1
            path[count] = pairs + i * n + found
            count += 1
            i = found
        path[count] = 2 * n + i
        count += 1
    path[count] = n + i
    return count + 1


@lean_part
def _up(
    i: int,
    path: Small,
    count: int,
    flow: Ints,
    start: Ints,
    end: Ints,
    group: Ints,
    groups: int,
    width: int,
    exit_head: Small,
    exit_next: Small,
) -> int:
    """Follow flow from node i back to the source; append the flow slots and return how many there are."""
    n = end.shape[0]
    pairs = (4 + width) * n
    while flow[i] <= 0:
        entries = min(width, end[i] - start[i])
        offset = 0
        while offset < entries and flow[4 * n + i * width + offset] <= 0:
            offset += 1
        if offset < entries:
            k = exit_head[(start[i] + offset) * groups + group[i]]
            while flow[3 * n + k] <= 0:
                k = exit_next[k]
            path[count] = 4 * n + i * width + offset
            path[count + 1] = 3 * n + k
            count += 2
        else:
            # The hubs of the entry layers follow each other, so one counter runs through all of them.
            hub = start[i] * groups
            k = -1
            while k < 0:
                k = exit_head[hub] if hub % groups != group[i] else -1
                while k >= 0 and flow[pairs + k * n + i] <= 0:
                    k = exit_next[k]
                hub += 1
            path[count] = pairs + k * n + i
            count += 1
        i = k
        path[count] = 2 * n + i
        count += 1
    path[count] = i
    return count + 1


@lean_part
def _drain(tables: Tables, state: FlowState, i: int) -> None:
    """Cancel all flow through node i, along whole paths from source to sink."""
    flow, path, number = state.flow, state.stack, state.number
    start, end, group = state.start, state.end, tables.group
    groups, width = tables.groups, tables.width
    log_at, log_by = state.log_at, state.log_by
    n = start.shape[0]
    # Every pass empties at least one arc of a path, so the loop ends with nothing through node i.
    while flow[2 * n + i] > 0:
        count = _down(i, path, flow, end, group, groups, width, state.entry_head, state.entry_next)
        path[count] = 2 * n + i
        count = _up(
            i, path, count + 1, flow, start, end, group, groups, width,
            state.exit_head, state.exit_next,
        )  # fmt: skip
        # A step of a path may look through the hubs of every group, so that is what it is counted as.
        number[WORK] += count * groups
        # As much as the narrowest arc of the path carries can be cancelled without a negative flow.
        min_flow = flow[path[0]]
        for step in range(1, count):
            min_flow = min(min_flow, flow[path[step]])
        for step in range(count):
            _add(flow, number, log_at, log_by, path[step], -min_flow)
        number[VALUE] -= min_flow


@lean_part
def _reach(
    vertex: int,
    before: int,
    slot: int,
    room: int,
    top: int,
    stamp: int,
    seen: Ints,
    parent: Small,
    via: Small,
    rooms: Ints,
    stack: Small,
) -> int:
    """Push a vertex that is not yet seen, with the arc it was reached by; return the new height.

    `slot` is the flow the arc raises, or its bitwise complement where the arc lowers it.
    """
    # A stamp marks what this search has seen; nothing needs to be cleared between two searches.
    seen[vertex] = stamp
    parent[vertex] = before
    via[vertex] = slot
    rooms[vertex] = min(rooms[before], room) if before >= 0 else room
    stack[top] = vertex
    return top + 1


@lean_part
def _find_path(  # noqa: C901 - one search; split up it would pass twenty arrays around
    number: Ints,
    layers: int,
    width: int,
    groups: int,
    rate: Ints,
    link: Ints,
    enter: Ints,
    leave: Ints,
    group: Ints,
    start: Ints,
    end: Ints,
    flow: Ints,
    entry_head: Small,
    entry_next: Small,
    exit_head: Small,
    exit_next: Small,
    seen: Ints,
    parent: Small,
    via: Small,
    rooms: Ints,
    stack: Small,
) -> int:
    """Search the residual graph from the source, depth first; return the node before the sink, or -1."""
    n = start.shape[0]
    stamp = number[STAMP]
    pairs = (4 + width) * n
    top = 0
    work = 0
    # Layer 0 has the hubs 0 to groups - 1: their entries are the nodes that the source feeds.
    for g in range(groups):
        entry = entry_head[g]
        while entry >= 0:
            k = entry // width
            if flow[k] < enter[k]:
                room = enter[k] - flow[k]
                top = _reach(k, -1, k, room, top, stamp, seen, parent, via, rooms, stack)
            entry = entry_next[entry]
    while top > 0:
        top -= 1
        work += 1 + groups
        vertex = stack[top]
        # Vertices below n are where nodes are entered: go back along flow that comes in, or on through the
        # node.
        if vertex < n:
            i = vertex
            s, e = start[i], end[i]
            for offset in range(min(width, e - s)):
                base = (s + offset) * groups
                to = 2 * n + base + group[i]
                slot = 4 * n + i * width + offset
                # The complement of a slot says that the path lowers this flow: it takes back what came from
                # the hub.
                if seen[to] != stamp and flow[slot] > 0:
                    top = _reach(
                        to, i, ~slot, flow[slot], top, stamp, seen, parent, via, rooms, stack
                    )
                for g in range(groups):
                    k = exit_head[base + g] if g != group[i] else -1
                    while k >= 0:
                        work += 1
                        slot = pairs + k * n + i
                        if seen[n + k] != stamp and flow[slot] > 0:
                            top = _reach(
                                n + k,
                                i,
                                ~slot,
                                flow[slot],
                                top,
                                stamp,
                                seen,
                                parent,
                                via,
                                rooms,
                                stack,
                            )
                        k = exit_next[k]
            room = rate[i, e - s] - flow[2 * n + i]
            if room > 0 and seen[n + i] != stamp:
                top = _reach(n + i, i, 2 * n + i, room, top, stamp, seen, parent, via, rooms, stack)
        # Vertices from n to 2n are where nodes are left: back through the node, to the sink, or to other
        # nodes.
        elif vertex < 2 * n:
            i = vertex - n
            if flow[2 * n + i] > 0 and seen[i] != stamp:
                slot = 2 * n + i
                top = _reach(
                    i, vertex, ~slot, flow[slot], top, stamp, seen, parent, via, rooms, stack
                )
            # A node that ends at the last layer leads to the sink only: there is no hub after it.
            if end[i] == layers:
                if flow[n + i] < leave[i]:
                    number[WORK] += work
                    return int(i)
                continue
            base = end[i] * groups
            for g in range(groups):
                entry = entry_head[base + g] if g != group[i] else -1
                while entry >= 0:
                    work += 1
                    k = entry // width
                    slot = pairs + i * n + k
                    if seen[k] != stamp and flow[slot] < link[i, k]:
                        room = link[i, k] - flow[slot]
                        top = _reach(
                            k, vertex, slot, room, top, stamp, seen, parent, via, rooms, stack
                        )
                    entry = entry_next[entry]
            # The own hub goes on the stack last, so depth first it is followed before the single links.
            to = 2 * n + base + group[i]
            if seen[to] != stamp:
                top = _reach(
                    to, vertex, 3 * n + i, _FREE, top, stamp, seen, parent, via, rooms, stack
                )
        else:
            # What is left are hubs: back to nodes whose flow comes into it, or on to all that may be entered
            # here.
            k = exit_head[vertex - 2 * n]
            while k >= 0:
                work += 1
                slot = 3 * n + k
                if flow[slot] > 0 and seen[n + k] != stamp:
                    top = _reach(
                        n + k,
                        vertex,
                        ~slot,
                        flow[slot],
                        top,
                        stamp,
                        seen,
                        parent,
                        via,
                        rooms,
                        stack,
                    )
                k = exit_next[k]
            entry = entry_head[vertex - 2 * n]
            while entry >= 0:
                work += 1
                k = entry // width
                if seen[k] != stamp:
                    slot = 4 * n + entry
                    top = _reach(
                        k, vertex, slot, _FREE, top, stamp, seen, parent, via, rooms, stack
                    )
                entry = entry_next[entry]
    number[WORK] += work
    return -1


@lean_part
def augment(tables: Tables, state: FlowState) -> None:
    """Raise the flow to a maximum."""
    flow, number, log_at, log_by = state.flow, state.number, state.log_at, state.log_by
    parent, via, rooms, leave = state.parent, state.slot, state.room, tables.leave
    n = state.start.shape[0]
    # The weakest layer bounds the flow: once it is met, no search has to prove that there is no further path.
    _, upper = weigh(state.cover, 0)
    while number[VALUE] < upper:
        number[STAMP] += 1
        last = _find_path(
            number, tables.layers, tables.width, tables.groups, tables.rate, tables.link, tables.enter,
            leave, tables.group, state.start, state.end, flow, state.entry_head, state.entry_next,
            state.exit_head, state.exit_next, state.seen, parent, via, rooms, state.stack,
        )  # fmt: skip
        if last < 0:
            return
        vertex = n + last
        by = min(rooms[vertex], leave[last] - flow[n + last])
        _add(flow, number, log_at, log_by, n + last, by)
        while vertex >= 0:
            if via[vertex] >= 0:
                _add(flow, number, log_at, log_by, via[vertex], by)
            else:
                _add(flow, number, log_at, log_by, ~via[vertex], -by)
            vertex = parent[vertex]
        number[VALUE] += by


@lean_part
def _fill(array: Ints | Small, value: int) -> None:
    """Write one value everywhere."""
    for i in range(array.shape[0]):
        array[i] = value


@lean_part
def take_over(tables: Tables, state: FlowState, start: Ints, end: Ints) -> int:
    """Take over a placement and compute its maximum flow from nothing; return its value."""
    _fill(state.flow, 0)
    _fill(state.cover, 0)
    _fill(state.entry_head, -1)
    _fill(state.exit_head, -1)
    _fill(state.seen, 0)
    # All but WORK begin anew: work is counted over the whole life of a state.
    for slot in range(WORK):
        state.number[slot] = 0
    for i in range(start.shape[0]):
        state.start[i] = start[i]
        state.end[i] = end[i]
        _enlist(tables, state, i)
    augment(tables, state)
    state.number[LOGGED] = 0
    value: int = state.number[VALUE]
    return value


@lean_part
def _recover(
    start: Ints, end: Ints, rate: Ints, cover: Ints, change: Ints, count: int, sign: int
) -> None:
    """Change `cover` as if the nodes of `change` had moved (sign 1), or back (sign -1)."""
    for c in range(count):
        i = change[c, 0]
        old = sign * rate[i, end[i] - start[i]]
        new = sign * rate[i, change[c, 2] - change[c, 1]]
        for layer in range(start[i], end[i]):
            cover[layer] -= old
        for layer in range(change[c, 1], change[c, 2]):
            cover[layer] += new


@lean_part
def weigh(cover: Ints, level: int) -> tuple[int, int]:
    """Return the summed capacity of layers, each counted up to `level`, and that of the weakest layer."""
    total, min_cover = 0, cover[0]
    for layer in range(cover.shape[0]):
        total += min(cover[layer], level)
        min_cover = min(min_cover, cover[layer])
    return total, min_cover


@lean_part
def weigh_after(
    start: Ints, end: Ints, rate: Ints, cover: Ints, change: Ints, count: int, level: int
) -> tuple[int, int]:
    """Return `weigh` as it would be after the moves of `change`."""
    _recover(start, end, rate, cover, change, count, 1)
    total, min_cover = weigh(cover, level)
    _recover(start, end, rate, cover, change, count, -1)
    return total, min_cover


@lean_part
def attempt(tables: Tables, state: FlowState, change: Ints, count: int, min_value: int) -> bool:
    """Move nodes (rows of `change`: node, start, end) if the flow is then at least `min_value`.

    Otherwise everything is left as it was. The rows are overwritten.
    """
    number = state.number
    # Only what this step changes is logged, so only that has to be undone.
    number[LOGGED] = 0
    # Flow is cancelled before any node moves: paths are followed through the lists of where nodes stand now.
    for c in range(count):
        _drain(tables, state, change[c, 0])
    for c in range(count):
        _place(tables, state, change, c)
    augment(tables, state)
    if number[VALUE] >= min_value:
        return True
    for c in range(count):
        _place(tables, state, change, c)
    logged = number[LOGGED]
    flow, log_at, log_by = state.flow, state.log_at, state.log_by
    # A log that is complete is taken back step by step; else the flow is computed again from nothing.
    if logged <= log_at.shape[0]:
        n = state.start.shape[0]
        for step in range(logged):
            flow[log_at[step]] -= log_by[step]
            # The first n slots are what enters from the source: their sum is the value of the flow.
            if log_at[step] < n:
                number[VALUE] -= log_by[step]
    else:
        _fill(flow, 0)
        number[VALUE] = 0
        augment(tables, state)
    return False


@lean_part
def _place(tables: Tables, state: FlowState, change: Ints, c: int) -> None:
    """Put the node of one row where the row says, and write into the row where it was."""
    i, s, e = change[c, 0], change[c, 1], change[c, 2]
    _delist(tables, state, i)
    change[c, 1] = state.start[i]
    change[c, 2] = state.end[i]
    state.start[i] = s
    state.end[i] = e
    _enlist(tables, state, i)
