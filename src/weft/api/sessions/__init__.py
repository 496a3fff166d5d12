"""`weft.session`: this process's place in a job, and the methods of a session."""
