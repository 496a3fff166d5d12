"""The reference models, written as on one device."""
