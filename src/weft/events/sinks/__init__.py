"""Sinks of events, a file each, with a function `create(run: Listening) -> Sink | None`.

`sinks_of` asks all files of this folder: a new sink is a new file.  None: this rank has no use for it.
"""
