"""Feedback of people on a run's answers: the page, the journal of judgements, and their delivery to the run."""
