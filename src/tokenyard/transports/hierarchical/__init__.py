"""Rows over two levels: once per node over the network, then on in memory that the node shares."""

from tokenyard.transports.hierarchical.transport import HierarchicalTransport

__all__ = ["HierarchicalTransport"]
