"""Tensor ranks as a mesh of two or three dimensions."""
