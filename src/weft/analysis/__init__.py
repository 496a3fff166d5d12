"""Looking at a model: from one forward to its profile, and to how it may be split, cut and shared."""
