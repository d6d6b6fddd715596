"""Memory that ranks of one machine share: segments, and what they tell each other in them."""
