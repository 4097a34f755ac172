"""Scripts are no package: their folder is on the path, as Python puts it there for the one that is run."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
