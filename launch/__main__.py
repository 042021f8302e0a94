"""Run `distil` as `python -m launch`, for torchrun."""

from launch.cli import main

if __name__ == "__main__":
    main()
