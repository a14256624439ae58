"""Any-to-any models: which parts share an executor, on which machines, and which way requests go."""
