"""`weft.session` and `weft.spawn`: this process's place in a job, and the methods of a session.

`share_errors` explains errors of torch that come of treating a rank's share of a model as the whole.
"""
