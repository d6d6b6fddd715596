"""Transports: how rows get from rank to rank. They know bytes and counts, not tokens or experts."""

from tokenyard.transports.base import Communicator, Sum, Transport
from tokenyard.transports.choose import (
    available,
    check_name,
    connect,
    open_slots,
    open_transport,
    why_not_shared,
)
from tokenyard.transports.collective import CollectiveTransport
from tokenyard.transports.shared_slots import SharedSlots
from tokenyard.transports.symmetric import Probe, why_not_attached
from tokenyard.transports.watch import Watch, Who, who_am_i

__all__ = [
    "CollectiveTransport",
    "Communicator",
    "Probe",
    "SharedSlots",
    "Sum",
    "Transport",
    "Watch",
    "Who",
    "available",
    "check_name",
    "connect",
    "open_slots",
    "open_transport",
    "who_am_i",
    "why_not_attached",
    "why_not_shared",
]
