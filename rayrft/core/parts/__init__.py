"""The kinds of actors of a run, one file each."""
