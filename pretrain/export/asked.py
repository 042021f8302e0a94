"""Check what is asked of an export before torch is imported, which takes seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from data_prep.messages import extra
from data_prep.shards import open_shards
from pretrain import RunError
from pretrain.run_folder import recorded, taken


@dataclass(frozen=True)
class Onnx:
    """Say which ONNX files an export gets."""

    int8: bool = False
    fp16: bool = False
    max_drop: float = 0.005  # largest fall of the quality by int8
    data: Path | None = None  # shards or a table of pairs; of a run its shards, if they are there


def check_packages() -> None:
    """Refuse to begin without the packages of the extra.

    Raises:
        RunError: names the first that is missing.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(name) is None:
            raise RunError(f"ONNX files need the package {name}: {extra('onnx')}")


def check_onnx(source: Path | str, wanted: Onnx) -> Onnx:
    """Refuse what cannot be made or checked; return it with the data of a run filled in.

    Raises:
        RunError, CorpusError: a package, or what to measure on, is missing.
    """
    check_packages()
    if not 0 <= wanted.max_drop < 1:
        raise RunError(f"--max-drop {wanted.max_drop:g}: must be at least 0 and below 1")
    if wanted.data is not None:
        if not wanted.data.exists():
            raise RunError(f"--data {wanted.data}: does not exist")
        if not wanted.data.is_file():
            open_shards(wanted.data, "validation")
        return wanted
    problem = ""
    if (config := recorded(Path(source))) is not None:
        try:
            open_shards(config.shards, "validation")
            return replace(wanted, data=config.shards)
        except ValueError as error:  # moved or damaged, or without validation rows
            problem = f" ({error})"
    if wanted.int8:
        raise RunError(
            f"--int8: there is nothing to measure {source} on{problem}; give --data SHARDS, or "
            "of a sentence encoder a table of pairs with scores"
        )
    return wanted


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
