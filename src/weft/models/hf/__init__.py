"""Models of `transformers`: built from a config and a folder of weights, with the tables of their families."""

from weft.models.hf._attention import drop_masks as drop_masks
from weft.models.hf._attention import making_masks as making_masks
from weft.models.hf._attention import mask_says as mask_says
from weft.models.hf._attention import window_of as window_of
from weft.models.hf._build import build_hf as build_hf
from weft.models.hf._build import register as register
from weft.models.hf._squares import count_places as count_places
from weft.models.hf._squares import square_buffers as square_buffers
from weft.models.hf._tables import tables_of_model as tables_of_model
