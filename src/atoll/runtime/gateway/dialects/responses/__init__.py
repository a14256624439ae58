"""OpenAI's `/v1/responses`, without a memory: every request brings all it is about."""
