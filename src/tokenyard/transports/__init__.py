"""Transports: how rows get from rank to rank. They know bytes and counts, not tokens or experts."""

from tokenyard.transports.base import Communicator, Transport
from tokenyard.transports.choose import available, connect, open_transport
from tokenyard.transports.collective import CollectiveTransport

__all__ = [
    "CollectiveTransport",
    "Communicator",
    "Transport",
    "available",
    "connect",
    "open_transport",
]
