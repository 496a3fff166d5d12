"""From what a session was told, and a model that is built, to a plan.

`arguments` refuses arguments that cannot be used, `settings` holds those of the plan.  `describe` says what a search
needs to know of a model, `first_looks` what preflight has found, and `session_plan` chooses and checks the plan.
"""
