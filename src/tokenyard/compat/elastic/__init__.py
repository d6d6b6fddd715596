"""DeepEP V2's shape over the same engine: ElasticBuffer and the EPHandle that its dispatch returns.

buffer    ElasticBuffer, what users hold
handle    EPHandle, and what it keeps of the dispatch that made it
domains   which ranks count as a node, and how large buffers should be
dispatch  compact and expanded, new and along a handle
combine   the sums, by top-k lane
engram    a table over all ranks, of which each fetches entries
pipeline  tensors between neighbours
sessions  all-gathers into memory that is used again
pipes, results, shared
          the memory, or connections, of the last three
"""

from tokenyard.compat.elastic.buffer import ElasticBuffer
from tokenyard.compat.elastic.handle import EPHandle

__all__ = ["EPHandle", "ElasticBuffer"]
