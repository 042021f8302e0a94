"""Name the shipped configs, and the special ids of tiny models."""

from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"

SPECIAL = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
