"""Planning and simulation in one loop.

plan      what `solve` finds, and on a cluster the best of it by simulation
verify    simulate a plan, and plan with more headroom until its promises are kept
rank      value placements by simulating them
deadline  simulations that keep a deadline
warm      compile all that planning and simulating need
"""
