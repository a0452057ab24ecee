"""`python -m igeood.cli`."""

from igeood.cli import main

main()
