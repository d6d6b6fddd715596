"""The low-latency mode: its steps, and whole calls of it for ranks that share memory."""
