"""What happens to rows inside one rank: align, permute, rearrange, quantise.

These functions need no process group. Each checks its input and calls the kernel set for the
input's device.
"""
