"""The sinks of a run, each a file in `weft/events/sinks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from weft.events._folder import RunFolder
from weft.events._owner import Owned
from weft.events._run import Sink
from weft.extensions import extensions_of, load_extension

Track = Callable[[str, float, int], object]
"""`track(name, value, step)`: TensorBoard's `writer.add_scalar`, or a line for another tracker."""
_PACKAGE = "weft.events.sinks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The things from which the sinks of a rank are created."""

    rank: int
    folder: RunFolder | None = None
    """Folder of the whole run, which logs are written to; None: nothing is recorded."""
    model_folder: RunFolder | None = None
    """Folder of the model that this run trains, where a session trains several; None: `folder`."""
    owner: Owned | None = None
    """Owner of the folder, whose signs of life this rank's events are; None: another process gives them."""
    prints_steps: bool = False
    """Whether a person watches the training on rank 0's terminal."""
    prints_learning_rate: bool = False
    """Whether they are shown the learning rate, which a schedule changes."""
    prints_warnings: bool = False
    """Whether warnings go to rank 0's terminal."""
    track: Track | None = None
    """Function of the user's that is given every number of rank 0."""
    track_prefix: str = ""
    """Prefix of the names of these numbers."""

    @property
    def of_model(self) -> RunFolder | None:
        """Folder of what is recorded of one model."""
        return self.folder if self.model_folder is None else self.model_folder


def sinks_of(run: Listening) -> Iterator[Sink]:
    """Yield the sinks of a rank, by `create(run)` of every file in `weft/events/sinks`, in the order of their names."""
    for name in extensions_of(_PACKAGE):
        sink: Sink | None = load_extension(_PACKAGE, name).create(run)
        if sink is not None:
            yield sink
