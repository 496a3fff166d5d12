"""Classes by name, as rows of a source have them."""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import did_you_mean


def class_number(name: str, classes: Mapping[str, int]) -> int:
    """Return the number of a class.

    Raises:
        ValueError: nobody named the classes, or not this one.
    """
    if not classes:
        raise ValueError("nothing says which class it is: name all in `label2id` of config.json, or give numbers")
    if name not in classes:
        known = ", ".join(list(classes)[:8]) + (", …" if len(classes) > 8 else "")
        raise ValueError(f"the classes are {known}.{did_you_mean(name, classes)}")
    return classes[name]
