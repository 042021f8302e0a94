"""Let these tests import tests/support, whose files for kernels need torch and transformers only.

The conftest.py of tests/pretrain makes a corpus, which needs pydantic; a GPU machine may lack it.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
