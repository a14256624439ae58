"""An instance of the stage engine as an OpenAI endpoint: one process in front of the nodes of a pipeline.

Begin with `instance_process` (run with `python -m` and `--config FILE`) and `instance_server`, the endpoints.

    instance_config      configuration of the process
    instance_requests    OpenAI's bodies, as requests to the engine (`choice_request`)
    completion_options, pooling, tokenizing, vectors   parts of single endpoints
    instance_answers     the engine's tokens, as OpenAI's answers; `choice_merger` joins several choices
    tools                functions that may be called, and how calls are written and read
    plan_router          the pipeline of each request, by the plan's flows
    instance_metrics     figures under vLLM's names

May import `engine`, `runtime.http` and `runtime.openai`; knows no gateway.
"""
