"""Transports: how rows get from rank to rank. They know bytes and counts, not tokens or experts."""

from tokenyard.shm.segment import Probe, why_not_attached
from tokenyard.transports.base import Sum, Transport
from tokenyard.transports.choose import available, check_name, open_transport, why_not_shared
from tokenyard.transports.collective import CollectiveTransport

__all__ = [
    "CollectiveTransport",
    "Probe",
    "Sum",
    "Transport",
    "available",
    "check_name",
    "open_transport",
    "why_not_attached",
    "why_not_shared",
]
