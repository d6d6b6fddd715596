"""Transports: how rows get from rank to rank. They know bytes and counts, not tokens or experts."""

from tokenyard.shm.segment import Probe, why_not_attached
from tokenyard.transports.base import Offer, RowsBack, RowsOut, Sum, Transport
from tokenyard.transports.choose import (
    Opening,
    available,
    check_name,
    open_transport,
    why_not_shared,
)
from tokenyard.transports.collective import CollectiveTransport

__all__ = [
    "CollectiveTransport",
    "Offer",
    "Opening",
    "Probe",
    "RowsBack",
    "RowsOut",
    "Sum",
    "Transport",
    "available",
    "check_name",
    "open_transport",
    "why_not_attached",
    "why_not_shared",
]
