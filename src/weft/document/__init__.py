"""Frozen dataclasses and TOML: strict reading with places in every error, writing with comments, overrides."""

from weft.document._bind import Flattened as Flattened
from weft.document._bind import bind as bind
from weft.document._bind import to_table as to_table
from weft.document._conform import HIDDEN as HIDDEN
from weft.document._conform import problem_error as problem_error
from weft.document._json import LARGEST_COUNT as LARGEST_COUNT
from weft.document._json import JsonObject as JsonObject
from weft.document._json import is_plain_name as is_plain_name
from weft.document._json import read_plain_file as read_plain_file
from weft.document._override import Override as Override
from weft.document._override import lay_over as lay_over
from weft.document._override import parse_overrides as parse_overrides
from weft.document._read import SET as SET
from weft.document._read import Document as Document
from weft.document._read import parse_document as parse_document
from weft.document._read import read_document as read_document
from weft.document._read import sentence as sentence
from weft.document._rules import Rules as Rules
from weft.document._text import Path as Path
from weft.document._text import dotted as dotted
from weft.document._text import spell as spell
from weft.document._typed import plain as plain
from weft.document._typed import typed as typed
from weft.document._write import describe_fields as describe_fields
from weft.document._write import dump as dump
