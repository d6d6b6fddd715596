"""Layouts that kernels and transports must both know: each is written down here, once.

    call, nodes_table, balance  the tables that compiled calls are told by
    message, node_blocks        what ranks tell each other before rows move
    signals, verdicts           what a call waits for, and how it ended
    counters                    what is counted
    columns, int64s             rows in memory, column by column; memory of whole numbers
    fp8, logfmt                 casts of rows, and their codes
    rings                       how a call uses the rings of the ring transport

`spec` says the same in its own words, so that a mistake here cannot hide there.
"""
