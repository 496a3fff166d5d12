"""What the ranks of a session say to one another, and where they write it down.

`agreement` compares settings, models and batches before collectives could go astray.  `calls` knows which call each
rank is in, so that ranks that do different things are named.  `exchange` carries values between ranks, in the form that
`json_values` gives them.  `recording` makes the run's folder and its events.
"""
