"""What is known of a recipe's model without building it: sizes, operators, tables, and what follows from them."""

from weft.description._description import Description as Description
from weft.description._of_recipe import describe_family as describe_family
from weft.description._of_recipe import description_of as description_of
from weft.description._of_recipe import description_of_shape as description_of_shape
from weft.description._of_recipe import description_of_sizes as description_of_sizes
from weft.description._of_recipe import facts_of as facts_of
from weft.description._of_recipe import profile_of as profile_of
from weft.description._small import SMALL_SEQUENCE_LENGTH as SMALL_SEQUENCE_LENGTH
from weft.description._small import shrink_config as shrink_config
from weft.description._small import shrink_shape as shrink_shape
from weft.description._small import shrink_sizes as shrink_sizes
from weft.description._store import store as store
from weft.description._store import store_page as store_page
from weft.description._store import stored as stored
from weft.description._store import stored_page as stored_page
from weft.description._text import of_json as of_json
from weft.description._text import to_json as to_json
