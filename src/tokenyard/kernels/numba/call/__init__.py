"""A whole call between ranks that share memory, in one compiled function.

    meet       messages and signals: all ranks go on, or all raise
    count      who gets each token, and what that tells the others
    by_source  a dispatch whose rows are written where they belong, by (source rank, token)
    by_expert  a dispatch whose rows are taken from the parcels of all ranks, by expert
    sums       a combine: rows are read where they lie, and summed
    halves     calls in two halves, to send and to receive, of which these are made:
    slots      a dispatch to fixed slots of each expert
    slot_sums  and its combine

A call takes the address of a table (`wire.call`) and returns a verdict (`wire.verdicts`). It never
waits for ever and never raises: whatever is unusual is left to Python, which then makes the call
again. What another rank wrote is copied, and compared with what it may be, before it becomes an
address, a place or a count.
"""
