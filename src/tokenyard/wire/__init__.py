"""Layouts that kernels and transports must both know: each is written down here, once.

    columns      rows in memory, column by column, and the size of a cache line
    fp8          groups, casts and their codes
    slots        blocks and posts of the low-latency mode
    call_table   the words that a compiled low-latency call reads
    verdicts     how a compiled call ended
    rings        how a call uses the rings of the ring transport

`spec` says the same in its own words, so that a mistake here cannot hide there.
"""
