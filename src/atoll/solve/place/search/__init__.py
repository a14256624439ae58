"""Local search over placements: moves, annealing and the max-flow kernel they share."""
