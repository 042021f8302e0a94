"""Everything that starts things: the command line, config loading, the demo."""

import pretrain  # noqa: F401  bounds the spinning of OpenMP's threads before torch is imported
