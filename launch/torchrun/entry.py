"""Run a module as `python -m` does, but import nothing from the working directory.

    python .../launch/torchrun/entry.py MODULE [ARGUMENT ...]

`python -m` puts the working directory first on the import path: a yaml.py there would be executed
instead of the library. Python 3.10 has no option against that (-P came with 3.11).
"""

import atexit
import gc
import os
import sys

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    # Python puts a script's folder there, unless PYTHONSAFEPATH is set.
    if sys.path and os.path.abspath(sys.path[0]) == here:
        del sys.path[0]
    root = os.path.dirname(os.path.dirname(here))
    if root not in sys.path:  # a checkout that is not installed
        sys.path.insert(0, root)
    import runpy

    atexit.register(gc.freeze)  # see launch.cli.main
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
