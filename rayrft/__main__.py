"""``python -m rayrft`` is the command line."""

from rayrft.cli import main

main()
