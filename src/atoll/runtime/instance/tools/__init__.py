"""Tool calls of the stage engine: what may be called, how a model writes calls, and how they are read.

`functions` reads the tools of a request, `history` the calls in its messages. `formats` knows how models
write calls: each format makes the grammar that an answer must follow. `parser` reads calls out of an answer
while it comes, and `answer` does so token by token. What is shown is a function of the tokens and of nothing
else, so an answer that broke off anywhere goes on elsewhere.
"""
