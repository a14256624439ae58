"""Planning and simulation in one loop.

plan         what `solve` finds, sized to keep promises; on a cluster the best of it by simulation
promise      the cheapest plan whose promises a share of requests keeps
loads        what an instance keeps by how much is asked of it
prospects    templates that a cheaper plan would use next
losses       nodes that are lost while a plan serves
uncertainty  how sure a plan is of its promises, over what the performance model may be off by
rank         value placements by simulating them
deadline     simulations that keep a deadline
warm         compile all that planning and simulating need
"""
