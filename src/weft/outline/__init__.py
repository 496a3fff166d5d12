"""What a rank's program is made of, without torch: an outline of the model, a rank's share of it, and what it sends."""

from weft.outline._outline import Block as Block
from weft.outline._outline import Call as Call
from weft.outline._outline import CallKind as CallKind
from weft.outline._outline import Outline as Outline
from weft.outline._outline import Parameter as Parameter
from weft.outline._outline import Split as Split
from weft.outline._send import Send as Send
from weft.outline._send import When as When
from weft.outline._share import Held as Held
from weft.outline._share import Part as Part
from weft.outline._share import Share as Share
