"""What happens to rows inside one rank: align, permute, rearrange, quantise.

Each works alone, without a process group. A function checks what it is given and calls the kernel
set for its device.
"""
