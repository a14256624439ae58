"""The pipeline-stage engine: a layer range of a transformer, paged KV, continuous batching.

Importing this package loads no torch and no ZeroMQ; the modules that need them say so.
"""
