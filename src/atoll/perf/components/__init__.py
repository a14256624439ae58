"""The performance model of any-to-any models: encoders, llms, talkers, vocoders and image generators.

`loads` says which parts requests of a class need and how much work they bring, `shapes` what a part is as a
transformer and what it weighs, `batches` how long the parts without tokens to generate take, `executor` what
an executor of some parts carries in seconds of its time per request, and `steps` the same as a simulator
asks for it. `measured` has rates that users or papers measured.
"""
