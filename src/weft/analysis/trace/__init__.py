"""Records one forward of a model on the meta device: its operators, and what backward keeps."""
