"""Commands of the nodes of an instance: for any target, and for people to paste.

Begin with `node_commands`: it turns an instance into commands. The others are run by those commands
beside the engine, as `python -m`, or say how nodes find each other.

    node_commands    from an instance to the commands of its nodes
    paste            commands as lines for a terminal
    stage_node       a node of Atoll's stage engine
    stored_weights   fetches weights, then becomes the engine
    instance_member  finds the other nodes of the instance, then runs the engine
    meeting          where nodes find each other: a folder or the fabric
    prefill_helpers  prefill instances that help decode instances
"""
