"""Start everything: the command line, configs, runs of several processes."""

import pretrain  # noqa: F401  bounds the spinning of OpenMP's threads before torch is imported
