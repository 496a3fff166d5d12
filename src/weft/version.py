"""The version of Weft."""

VERSION = "0.1.0"
