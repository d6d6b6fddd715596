"""A call: inputs are checked and counted, ranks agree, rows move."""
