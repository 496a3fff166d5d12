"""Blueprints, losses, and the way from a recipe to a model; each kind of model is a module, loaded when it is built."""

from weft.families import INHERITED as INHERITED
from weft.families import Crossing as Crossing
from weft.families import Cut as Cut
from weft.families import CutTable as CutTable
from weft.families import FoundCut as FoundCut
from weft.families import Localise as Localise
from weft.families import SplitRule as SplitRule
from weft.families import Tables as Tables
from weft.models._adopt import tables_of as tables_of
from weft.models._blueprint import Batch as Batch
from weft.models._blueprint import Blueprint as Blueprint
from weft.models._blueprint import Initialiser as Initialiser
from weft.models._blueprint import Loss as Loss
from weft.models._blueprint import logits_of as logits_of
from weft.models._build import build_model as build_model
from weft.models._build import build_reference as build_reference
from weft.models._examples import token_example as token_example
from weft.models._losses import IGNORED as IGNORED
from weft.models._losses import LazyLogits as LazyLogits
from weft.models._losses import class_loss as class_loss
from weft.models._losses import count_labels as count_labels
from weft.models._losses import loss_by_name as loss_by_name
from weft.models._losses import regression_loss as regression_loss
from weft.models._losses import token_loss as token_loss
from weft.models._seeded import others_draw as others_draw
from weft.models._seeded import seeded as seeded
