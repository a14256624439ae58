"""Large clusters, by counts: machines that are alike are numbers until the last step.

site_placement   one service on hundreds or thousands of machines; begin here
stock            machines that are alike, with their links, by a small sample of the cluster
stage_rates      what one of them carries as a stage of a pipeline, by goal
pipeline_bound   the largest flow over pipelines of parts of machines: a bound, and the cuts worth trying
stage_fill       cuts filled with whole machines; `stage_exchange` betters them
stage_patterns   stages of whole machines for the largest flow, by an integer program
spread_flow      a flow within a promise, in small messages

Imports `place.flow_instance`, `place.from_problem` and `solve.lp`.
"""
