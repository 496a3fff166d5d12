"""ZeRO: data ranks share out optimizer states (1), gradients (2) and weights (3)."""
