"""Makes the storage slow: every batch that a reader of Weft's reads takes 0.1 s longer.

Python imports a module of this name when it starts, so the helper processes that prefetch are slow like their parent.
The prefetch benchmark alone puts this folder on the import path.
"""

import time
from typing import Any

from weft.data import _reader

SECONDS = 0.1


def _slowly(read: Any) -> Any:
    def slow_read(*arguments: Any) -> Any:
        time.sleep(SECONDS)
        return read(*arguments)

    return slow_read


_reader.TrainReader.read = _slowly(_reader.TrainReader.read)
