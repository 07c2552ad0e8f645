"""People's feedback on a run's answers: a page, what it keeps, and what becomes of it."""
