"""Whether a plan keeps what it says, without trusting the solver that made it: start at `check`."""
