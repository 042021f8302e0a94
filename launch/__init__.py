"""Start everything: the command line, configs, runs of several processes."""

import pretrain  # noqa: F401  sets what torch reads when it is imported
