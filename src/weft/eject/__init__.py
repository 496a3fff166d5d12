"""Eject: one readable PyTorch script that trains a recipe under a plan without Weft.  Importable without torch."""
