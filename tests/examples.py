"""How many examples Hypothesis draws: a third of what a test names, and all of them in ``scripts/test --all``."""

import os

from hypothesis import settings

ALL = bool(os.environ.get("YGGDRASIL_ALL_TESTS"))  # ``scripts/test --all``
_SHARE = 1 if ALL else 3
USUAL = settings.default.max_examples // _SHARE


def examples(count: int, **options: object) -> settings:
    """Settings for ``count`` examples with ``--all``."""
    return settings(max_examples=max(count // _SHARE, min(count, 6)), **options)
