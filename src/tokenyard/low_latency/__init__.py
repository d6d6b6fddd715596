"""The low-latency mode: a few tokens, fixed slots, and no counting round.

calls    the part of Buffer that users see: DeepEP V1's signatures
engine   what a call does, in which order
inputs   what calls are given, checked
results  where it arrives, and the half of a call that is done later
"""
