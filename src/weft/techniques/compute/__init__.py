"""What each rank computes on, in what precision, and how long it waits for others."""
