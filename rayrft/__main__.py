"""``python -m rayrft`` is the command line."""

from rayrft.cli.main import main

main()
