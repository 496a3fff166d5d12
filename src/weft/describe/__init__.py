"""Describe: any module or recipe becomes a Profile.  Needs torch; from a few numbers weft.profile makes one."""
