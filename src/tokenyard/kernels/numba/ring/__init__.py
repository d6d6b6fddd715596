"""Rings in memory that ranks share: the protocol, and a dispatch and a combine through them."""
