"""`python -m cgprof` is the console script."""

from cgprof.cli.app import main

main()
