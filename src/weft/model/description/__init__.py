"""Facts of a recipe's model, found without building it: sizes, operators, tables, and limits that follow from them."""

from weft.model.description._description import Description as Description
from weft.model.description._of_recipe import describe_family as describe_family
from weft.model.description._of_recipe import description_of as description_of
from weft.model.description._of_recipe import description_of_shape as description_of_shape
from weft.model.description._of_recipe import description_of_sizes as description_of_sizes
from weft.model.description._of_recipe import facts_of as facts_of
from weft.model.description._of_recipe import profile_of as profile_of
from weft.model.description._small import SMALL_SEQUENCE_LENGTH as SMALL_SEQUENCE_LENGTH
from weft.model.description._small import shrink_config as shrink_config
from weft.model.description._small import shrink_shape as shrink_shape
from weft.model.description._small import shrink_sizes as shrink_sizes
from weft.model.description._store import store as store
from weft.model.description._store import store_page as store_page
from weft.model.description._store import stored as stored
from weft.model.description._store import stored_page as stored_page
from weft.model.description._text import of_json as of_json
from weft.model.description._text import to_json as to_json
