"""The joint problem by exchanging the few pairs that are open: our heuristic.

Begin with `exchange`: it holds a few pairs of model and machine, and changes one or two at a time.

    exchange_offers, anchors            pairs in a configuration, and where to start from
    exchange_steps, estimates           steps to a cheaper selection, and lower bounds that skip most of them
    exchange_routing, exchange_prices, ways
                                        types routed to the chosen pairs, at prices of what they share

All but `exchange` and `exchange_offers` are compiled by numba.
"""
