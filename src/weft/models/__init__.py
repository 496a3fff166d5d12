"""Reference models, interop with Hugging Face, and blueprints."""

from weft.models._adopt import Tables as Tables
from weft.models._adopt import tables_of as tables_of
from weft.models._blueprint import Batch as Batch
from weft.models._blueprint import Blueprint as Blueprint
from weft.models._blueprint import CutTable as CutTable
from weft.models._blueprint import Initialiser as Initialiser
from weft.models._blueprint import Localise as Localise
from weft.models._blueprint import Loss as Loss
from weft.models._blueprint import SplitRule as SplitRule
from weft.models._blueprint import logits_of as logits_of
from weft.models._build import build_model as build_model
from weft.models._build import build_reference as build_reference
from weft.models._convnet import build_convnet as build_convnet
from weft.models._decoder import build_decoder as build_decoder
from weft.models._encoder import build_encoder as build_encoder
from weft.models._factory import build_factory as build_factory
from weft.models._generate import generate as generate
from weft.models._hf import build_hf as build_hf
from weft.models._losses import IGNORED as IGNORED
from weft.models._losses import LazyLogits as LazyLogits
from weft.models._losses import class_loss as class_loss
from weft.models._losses import loss_by_name as loss_by_name
from weft.models._losses import regression_loss as regression_loss
from weft.models._losses import token_loss as token_loss
from weft.models._mlp import build_mlp as build_mlp
