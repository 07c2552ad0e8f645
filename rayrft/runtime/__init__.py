"""How code runs elsewhere: actors, processes and applications of Ray Serve."""
