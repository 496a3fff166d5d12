"""Families of models, a file each: what looking at a model does not tell; and how any model splits.  No torch."""

from weft.model.families._family import Config as Config
from weft.model.families._family import Family as Family
from weft.model.families._find import families as families
from weft.model.families._find import family_of as family_of
from weft.model.families._samples import SampleField as SampleField
from weft.model.families._tables import DROPPED_ATTENTION as DROPPED_ATTENTION
from weft.model.families._tables import INHERITED as INHERITED
from weft.model.families._tables import NO_SEQUENCE as NO_SEQUENCE
from weft.model.families._tables import NO_VOCABULARY as NO_VOCABULARY
from weft.model.families._tables import OF_PARAMETERS as OF_PARAMETERS
from weft.model.families._tables import OWN_CHECKPOINTS as OWN_CHECKPOINTS
from weft.model.families._tables import ROUTED_FEATURES as ROUTED_FEATURES
from weft.model.families._tables import UNKNOWN_ATTENTION as UNKNOWN_ATTENTION
from weft.model.families._tables import UNKNOWN_FEATURES as UNKNOWN_FEATURES
from weft.model.families._tables import WINDOWED_ATTENTION as WINDOWED_ATTENTION
from weft.model.families._tables import Crossing as Crossing
from weft.model.families._tables import Cut as Cut
from weft.model.families._tables import CutTable as CutTable
from weft.model.families._tables import FoundCut as FoundCut
from weft.model.families._tables import Localise as Localise
from weft.model.families._tables import SplitRule as SplitRule
from weft.model.families._tables import Tables as Tables
from weft.model.families._tables import found_split_note as found_split_note
