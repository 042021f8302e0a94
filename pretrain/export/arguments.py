"""Check the arguments of an export before torch is imported, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from pretrain import RunError
from pretrain.run_folder import taken


def check_target(run: Path, folder: Path, *, again: bool) -> None:
    """Refuse to export a run to a folder that holds something or lies among its checkpoints.

    Args:
        run: the output folder of the run.
        folder: the target.
        again: it may hold an export; the export compares the two.
    """
    target = folder.resolve()
    if not again and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise taken(folder)
    if target.is_relative_to((run / "checkpoints").resolve()):
        raise RunError(f"{folder}: lies among the run's checkpoints; export to another folder")


def check_repository(name: str) -> None:
    """Raise RunError for what cannot be a repository's name on a hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise RunError(f"--push {name!r}: not NAME or OWNER/NAME; nothing was written") from None


def hub_token() -> str:
    """Return the token of HF_TOKEN, or that of `hf auth login`.

    Raises:
        RunError: there is neither.
    """
    token = get_token()
    if not token:
        raise RunError(
            "--push needs a token with write access: run `hf auth login`, or set the environment "
            "variable HF_TOKEN; nothing was written"
        )
    return token
