"""Let these tests import the helpers of tests/pretrain that need torch and transformers only.

That folder's own conftest.py makes a corpus, which needs pydantic; a GPU machine may lack it.
"""

import sys
from pathlib import Path

for folder in ("pretrain", "."):
    sys.path.append(str(Path(__file__).parents[1] / folder))
