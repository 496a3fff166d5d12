"""Several hosts in one job: which of them are there, who leads, and what each has said."""
