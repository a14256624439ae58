"""The front: answers OpenAI's requests for any-to-any models by running tasks over executors."""
