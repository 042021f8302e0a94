"""Ask the hub for a model's config.json, before torch and transformers are imported."""

from __future__ import annotations

from pathlib import Path

from data_prep.messages import first_line
from pretrain import RunError


def config_file(name: str, file: str = "config.json") -> Path:
    """Return a file of a hub's `name` or `name@revision`; nothing else is downloaded.

    Raises:
        OSError: the hub does not answer, or has no such name.
    """
    from huggingface_hub import hf_hub_download

    source, _, revision = name.partition("@")
    try:
        return Path(hf_hub_download(source, file, revision=revision or None))
    except ValueError as error:  # a name that no hub has
        raise OSError(str(error)) from error


def look_up(who: str, name: str) -> None:
    """Refuse a model that is neither a folder here, nor in the hub's cache, nor on the hub.

    Nothing is downloaded.

    Raises:
        RunError: it is not there, or the hub does not answer.
    """
    if Path(name).is_dir():
        return
    from huggingface_hub import HfApi, try_to_load_from_cache

    source, _, revision = name.partition("@")
    try:
        known = try_to_load_from_cache(source, "config.json", revision=revision or None)
        if not isinstance(known, str):
            HfApi().model_info(source, revision=revision or None)
    except Exception as error:  # hub, proxy and network raise unrelated classes
        raise not_there(who, error) from error


def not_there(who: str, error: Exception) -> RunError:
    """Return the error for a name that is not a local folder and that the hub does not give."""
    why = f"the hub does not give it ({first_line(error)})"
    if "Connect" in f"{type(error)} {error}" or "offline" in str(error).lower():
        why = "the hub cannot be reached from this machine"
    return RunError(
        f"{who}: no such folder here, and {why}; check the name, or give the path of a folder"
    )
