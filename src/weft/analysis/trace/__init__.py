"""One forward of a model on the meta device, written down."""
