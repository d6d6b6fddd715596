"""A whole dispatch, or combine, between ranks that share memory, in one compiled call."""
