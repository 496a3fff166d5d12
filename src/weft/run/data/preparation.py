"""Data before a run: text to memory-mapped token shards, a recipe's sources to what its ranks open, samples to files.

Ranks of a run need none of it.
"""

from weft.run.data._corpus import PreparedCorpus as PreparedCorpus
from weft.run.data._corpus import is_prepared as is_prepared
from weft.run.data._corpus import open_corpus as open_corpus
from weft.run.data._order import PlainSamples as PlainSamples
from weft.run.data._order import write_samples as write_samples
from weft.run.data._prepare import path_of as path_of
from weft.run.data._prepare import prepare as prepare
from weft.run.data._progress import ConsoleProgress as ConsoleProgress
from weft.run.data._progress import Progress as Progress
from weft.run.data._progress import silent as silent
from weft.run.data._recipe import describe_samples as describe_samples
from weft.run.data._recipe import prepare_data as prepare_data
from weft.run.data._tokenizer import load_tokenizer as load_tokenizer
from weft.run.data._tokenizer import separator_of as separator_of
