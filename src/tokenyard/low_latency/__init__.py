"""The low-latency mode: DeepEP's names over the ordinary call, with rows in fixed slots.

calls     the part of Buffer that users see: DeepEP V1's signatures
forks     arguments that forks of DeepEP have added
inputs    what calls are given, checked
shape     what follows from the sizes of calls
engine    what calls do alike, wherever ranks are
shared    calls where ranks share memory: compiled ones
places    what these keep: mailboxes, blocks, plans, masks
stepwise  calls where ranks share none: those of the engine by source, then slots
handle    what a dispatch leaves for its combine
logfmt    rows as DeepEP's 10-bit logarithms keep them
"""
