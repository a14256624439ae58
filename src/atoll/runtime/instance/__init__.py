"""An instance of the stage engine as an OpenAI endpoint: one process in front of the nodes of a pipeline.

config    what the process is told
requests  OpenAI's bodies, as what the engine is asked
answers   the engine's tokens, as OpenAI's answers
tools     what may be called, and how calls are written and read
routes    the pipeline of each request, by the plan's flows
metrics   figures under vLLM's names
server    the endpoints

`python -m atoll.runtime.instance.process --config FILE` runs one.
"""
