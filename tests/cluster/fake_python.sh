#!/usr/bin/env bash
# Stands for python, pip and rayrft in the tests of cluster/setup.sh: notes what it is asked for in $CALLS. Where $DIE_AT is in a
# call, that is where the machine goes off; a call with $LACKS fails.
case "$*" in
  *"import sys; sys.exit"*) exit 0 ;; # the version fits
  --version) echo "Python 3.11.0" ;;
  "-m venv "*) rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python && cp "$0" .venv/bin/rayrft ;;
  *find_spec*) exit 1 ;; # no package to be removed
esac
if [ -n "${LACKS:-}" ] && [[ "$*" == *"$LACKS"* ]]; then exit 1; fi
echo "$*" >>"$CALLS"
if [ -n "${DIE_AT:-}" ] && [[ "$*" == *"$DIE_AT"* ]]; then kill -9 "$PPID"; fi
