"""Which features of a model tensor ranks may have parts of."""
