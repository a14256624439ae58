"""How soon the command line answers, and what a first run waits for."""
