"""Where the time of a run went: recorded on every rank, kept in the run's folder, shown live and afterwards."""
