"""Plans that hold when things turn out otherwise, and what that certainty costs.

scenarios       what may turn out: demand, spot prices, spot machines lost, constants of the performance model
scenario_loads  how loaded a service's instances are in a scenario, by capacity
trial           in which scenarios a service keeps its promises: told by load, with simulations to tell how
service_options several ways to serve each service, from plans for slower GPUs, more demand and less spot
crossing        prefill of one option with decode of another
option_choice   the cheapest way for each service, together holding in enough scenarios
expected_prices what is expected to be paid
judge           how often a plan holds in scenarios that it was not chosen with
robust_plan     all of it: the curve, and the plan that is asked for
"""
