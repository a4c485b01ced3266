"""`python -m recast` is `recast`."""

from recast.cli import main

main()
