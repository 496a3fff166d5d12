"""Models of `transformers`: built from a config and a folder of weights, with the tables of their families."""

from weft.model.attention.hf import drop_masks as drop_masks
from weft.model.attention.hf import take_interface as take_interface
from weft.model.attention.hf import window_of as window_of
from weft.model.attention.places import count_places as count_places
from weft.model.hf._build import build_hf as build_hf
from weft.model.hf._build import register as register
from weft.model.hf._tables import tables_of_model as tables_of_model
