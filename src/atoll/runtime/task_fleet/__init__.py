"""From a plan with executors, or a file that names them, to processes on this machine."""
