"""The low-latency mode: a few tokens, fixed slots, and no counting round.

calls      the part of Buffer that users see: DeepEP V1's signatures
forks      arguments that forks of DeepEP have added
engine     what a call does, in which order
logfmt     rows as DeepEP's 10-bit logarithms keep them
inputs     what calls are given, checked
results    the memory in which tokens arrive
handle     what a dispatch leaves for its combine
posts      how ranks that share memory announce calls, fail and wait
shared     the exchange between ranks that share memory
exchanged  the exchange between ranks that do not
mismatch   what two posts differ in
"""
