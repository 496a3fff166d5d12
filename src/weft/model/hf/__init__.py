"""Models of `transformers`: built from a config and a folder of weights, with the tables of their families."""

from weft.model.attention.hf import drop_masks as drop_masks
from weft.model.attention.hf import making_masks as making_masks
from weft.model.attention.hf import mask_says as mask_says
from weft.model.attention.hf import window_of as window_of
from weft.model.attention.hf_buffers import count_places as count_places
from weft.model.attention.hf_buffers import square_buffers as square_buffers
from weft.model.hf._build import build_hf as build_hf
from weft.model.hf._build import register as register
from weft.model.hf._tables import tables_of_model as tables_of_model
