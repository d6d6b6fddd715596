"""What code written for DeepEP finds here: V1's tuples, fields and names about hardware, V2's
(`elastic`) and HybridEP's Buffers (`hybrid_ep`), and what `import deep_ep` means.

The core knows none of it. `tokenyard.Buffer` is `compat.buffer.Buffer`. All Buffers of this wing
are watched as the environment says.
"""

from tokenyard.observe import environment

environment.listen()
