"""Ways in from other systems, and out to them."""
