"""Describe: any module or recipe becomes a Profile.  Needs torch; the same Profile from a few numbers is in weft.profile."""
