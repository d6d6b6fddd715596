"""What people see of a run: traces of its calls, recordings of its routing, figures and pages of
these. The core tells `runtime.observers` of its calls, and knows nobody who listens.
"""
