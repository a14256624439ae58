"""Planning and simulation in one loop: plans whose promises a share of requests keeps, and are seen to.

Begin with `planning`: its docstring tells the way of every problem to its plan. The package may import
`solve`, `sim` and all below them.

planning         `plan`: solve, size by simulation, prove
rent_promises    the cheapest rented plan that keeps its promises
choice_promises  the same where several models may answer
place_promises   placements on a fixed cluster that keep their promises
graph_promises   plans of any-to-any models that keep their promises
headroom         promises of the fast solver: more room for services until enough requests keep them
quick_plan       plans in a second or two, sized by simulation, with nothing proven
robust/          plans that hold in a share of scenarios
pareto_sweep, front
                 curves of dollars against latency, error, energy or carbon
kept, graph_kept what requests keep of their promises, in simulation
load_curves, sizing, sized_templates, prospects
                 capacity of templates by simulation, and which of them to simulate
simulated_bound, smaller_plans
                 what any plan costs at least by such capacities; plans with an instance less or a cheaper one
redundancy       plans that keep promises with spot nodes lost
losses, step_tokens, rank, cp_tables
                 lost nodes, step lengths, placements ranked, tables of latency
uncertainty      how sure a plan is of its promises, over the errors that the performance model may have
simulation_deadline, warm
                 simulations that keep a deadline; compiling all that planning needs
"""
