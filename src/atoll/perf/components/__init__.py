"""The performance model of any-to-any models: encoders, llms, talkers, vocoders and image generators.

Begin with `executor`: what an executor of some parts carries, in seconds of its time per request. It reads
`class_loads` (which parts requests of a class need, and how much work they bring), `component_shapes` (a
part as a transformer, and what it weighs), `batches` and `kernels` (times of parts that work on whole
requests), `makers` and `talkers` (parts that make tokens and speech codes), `sites` and `space` (where
parts run together, and their memory). `executor_steps` is the same as a simulator asks for it; `measured`
has rates that users or papers measured.

It may import `perf`, `catalog`, `engines`, `workload` and `core`; nothing of plans or solvers.
"""
