"""Transports: how rows get from rank to rank. They know bytes and counts, not tokens or experts."""

from tokenyard.shm.segment import Probe, why_not_attached
from tokenyard.transports.base import Sum, Transport
from tokenyard.transports.choose import (
    available,
    check_name,
    open_slots,
    open_transport,
    why_not_shared,
)
from tokenyard.transports.collective import CollectiveTransport
from tokenyard.transports.shared_slots import SharedSlots

__all__ = [
    "CollectiveTransport",
    "Probe",
    "SharedSlots",
    "Sum",
    "Transport",
    "available",
    "check_name",
    "open_slots",
    "open_transport",
    "why_not_attached",
    "why_not_shared",
]
