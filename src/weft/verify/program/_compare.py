"""Compares predicted with recorded traffic."""

from __future__ import annotations

from collections import Counter

Traffic = Counter[tuple[str, str, int]]
"""(axis, operation, bytes) → how often."""


def differences(predicted: Traffic, seen: Traffic) -> list[str]:
    """Return every kind of send whose count differs, as lines; an empty list where the two are equal."""
    return [
        f"{operation} over {axis} of {size_bytes:,} bytes: {predicted[key]} predicted, {seen[key]} seen"
        for key in sorted(predicted.keys() | seen.keys())
        if predicted[key] != seen[key]
        for axis, operation, size_bytes in (key,)
    ]
