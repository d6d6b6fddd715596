"""The steps of a call of few rows between nodes, compiled.

`transports.hierarchical.enclosed` makes them for the engine, and `engine.nodes` makes them
with steps of its own before and after, so that a rank may make a call this way while another makes
it that way. Between the steps Python exchanges messages with other nodes and with the ranks of its
own.

A step takes the address of a table (`wire.nodes_table`) and never waits. What another rank wrote is
compared with what it may be before it becomes an address, a place or a count.
"""
