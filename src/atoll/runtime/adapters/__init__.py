"""Engines behind one door: each turns an instance of a plan into processes and an OpenAI endpoint.

    base      what an adapter returns, and where processes keep their files
    probes    is it ready, is it well: a real token
    stage     Atoll's own stage engine: any layout
    vllm      `vllm serve`: one node, or equal nodes in a row with uneven layers
    sglang    SGLang: one node
    llamacpp  llama.cpp's server from the wheel `xllamacpp`: one node, any CPU
    front     tasks over executors: several endpoints of OpenAI's API
    remote    anything that speaks OpenAI's API already

Nothing here starts a process; the agent does.
"""
