"""What a process has, whatever it exchanges: memory, threads, events, and streams of a GPU."""
