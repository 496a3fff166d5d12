"""Launchers that start ranks of a user's script, a file each, with `rank_info(environment) -> RankInfo | None`.

A file reads what its launcher has set in the environment of a rank.  `RankInfo.from_environment` asks all files of this
folder: a new launcher is a new file.  None: this process was started by another, or by none.
"""
