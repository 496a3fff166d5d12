"""Models of `transformers`: built from a config and a folder of weights, with the tables of the families known here."""

from weft.models.hf._build import build_hf as build_hf
