"""Operating a fleet: observing, carrying out, and writing down what was decided."""
