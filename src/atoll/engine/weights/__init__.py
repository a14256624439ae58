"""Weights of the stage engine: where they come from and how a stage reads its share of them.

Begin with `sources`: from the name of a model to a folder on this machine. `convert` turns a GGUF file into
such a folder, once; `reader` reads named tensors out of it, by byte range, and `matrix_reader` matrices in 8
and 4 bits. May import `core` and `engine`.
Nothing in a weights file is executed: safetensors and GGUF are data, pickles are not read.
"""
