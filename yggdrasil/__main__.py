"""``python -m yggdrasil``."""

from yggdrasil.cli import main

main()
