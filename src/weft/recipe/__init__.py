"""Recipe: what to train."""

from weft.recipe._hf_config import read_hf_config as read_hf_config
from weft.recipe._learning_rate import decay_start as decay_start
from weft.recipe._learning_rate import learning_rate as learning_rate
from weft.recipe._learning_rate import peak_learning_rate as peak_learning_rate
from weft.recipe._load import dump_recipe as dump_recipe
from weft.recipe._load import load_recipe as load_recipe
from weft.recipe._load import parse_recipe as parse_recipe
from weft.recipe._recipe import COMPRESSIONS as COMPRESSIONS
from weft.recipe._recipe import BatchRecipe as BatchRecipe
from weft.recipe._recipe import DataRecipe as DataRecipe
from weft.recipe._recipe import DataSource as DataSource
from weft.recipe._recipe import ModelRecipe as ModelRecipe
from weft.recipe._recipe import OptimizerRecipe as OptimizerRecipe
from weft.recipe._recipe import ParameterGroup as ParameterGroup
from weft.recipe._recipe import PermitRecipe as PermitRecipe
from weft.recipe._recipe import Precision as Precision
from weft.recipe._recipe import Recipe as Recipe
from weft.recipe._recipe import RunRecipe as RunRecipe
from weft.recipe._recipe import SplitKind as SplitKind
from weft.recipe._shapes import ConvNetShape as ConvNetShape
from weft.recipe._shapes import DecoderShape as DecoderShape
from weft.recipe._shapes import EncoderShape as EncoderShape
from weft.recipe._shapes import MlpShape as MlpShape
from weft.recipe._shapes import ReferenceShape as ReferenceShape
