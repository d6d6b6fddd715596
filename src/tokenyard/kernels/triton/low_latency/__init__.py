"""The low-latency mode's steps: what a dispatch does, what a combine does, and what both share."""
