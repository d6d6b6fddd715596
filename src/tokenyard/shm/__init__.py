"""Memory that ranks of one machine share: segments, messages in them, and who is still alive."""
