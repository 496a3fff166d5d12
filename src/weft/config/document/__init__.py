"""Frozen dataclasses and TOML: strict reading with places in every error, writing with comments, overrides."""

from weft.config.document._bind import Flattened as Flattened
from weft.config.document._bind import bind as bind
from weft.config.document._bind import to_table as to_table
from weft.config.document._conform import HIDDEN as HIDDEN
from weft.config.document._conform import problem_error as problem_error
from weft.config.document._json import LARGEST_COUNT as LARGEST_COUNT
from weft.config.document._json import Json as Json
from weft.config.document._json import JsonObject as JsonObject
from weft.config.document._json import is_plain_name as is_plain_name
from weft.config.document._json import read_plain_file as read_plain_file
from weft.config.document._override import Override as Override
from weft.config.document._override import lay_over as lay_over
from weft.config.document._override import parse_overrides as parse_overrides
from weft.config.document._read import SET as SET
from weft.config.document._read import Document as Document
from weft.config.document._read import parse_document as parse_document
from weft.config.document._read import read_document as read_document
from weft.config.document._read import sentence as sentence
from weft.config.document._rules import Rules as Rules
from weft.config.document._text import Path as Path
from weft.config.document._text import dotted as dotted
from weft.config.document._text import format_value as format_value
from weft.config.document._typed import plain as plain
from weft.config.document._typed import typed as typed
from weft.config.document._write import describe_fields as describe_fields
from weft.config.document._write import dump as dump
