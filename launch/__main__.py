"""`python -m launch` is `distil`, for torchrun."""

from launch.cli import main

if __name__ == "__main__":
    main()
