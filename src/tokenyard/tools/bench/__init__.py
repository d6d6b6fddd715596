"""Benchmarks: `tokenyard bench` without the command line.

    from tokenyard.tools.bench.running import run

    report = run("dispatch")           # starts ranks, verifies, measures
    report.as_dict()                   # plain values, for a JSON file

A benchmark compares its results with the specification before it measures. All ways take turns, and
a figure is the median of the rounds of the slowest rank, kept with its quartiles. `catalogue` lists
the benchmarks.
"""
