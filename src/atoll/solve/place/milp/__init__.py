"""Integer programmes of flow placement: the models, the engines that solve them, and the solver."""
