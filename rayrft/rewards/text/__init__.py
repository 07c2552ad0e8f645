"""Reading answers in plain text: statements, numbers, units, verdicts and choices."""
