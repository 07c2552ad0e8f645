"""The viewer: a page over run folders, of running and ended runs."""
