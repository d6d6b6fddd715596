"""What an exchange costs before a cluster is rented, and where experts should live.

    choices     how tokens choose experts, and which ranks and nodes they reach
    traffic     rows and bytes on every kind of link, expected or counted from a routing
    cost        the time of every stage, the link that binds it, and memory by part
    presets     clusters and models; `published` and `fitted` say where the numbers come from
    copies      which copies of experts tokens go to
    balance     placements with copies for measured loads
    shelves     the packing behind them
    even_out    a change of placement with few moves
    balancer    when to rebalance: the loop from measured loads to placements
    simulate    a recorded routing replayed at any number of ranks
    reports     what was found, as tables; `pictures` draws it, `page` writes HTML

All of it is arithmetic on this process's CPU: nothing here starts a rank.
"""
