"""Write files to a place that fsspec knows, and list its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem

from data_prep.sources.ranges import again

FILES_AT_ONCE = 8  # a driver may hold 50 MB of each
_NO_FOLDERS = {"hf", "adl", "oci", "oss"}  # to make one there would, at worst, make a bucket


def files_below(fs: AbstractFileSystem, root: str) -> dict[str, dict[str, Any]]:
    """Return what the file system tells of each file below `root`, by name."""
    fs.invalidate_cache()
    try:
        found = fs.find(root, detail=True)
    except FileNotFoundError:
        return {}
    return {path[len(root) + 1 :]: info for path, info in found.items()}


def send(
    fs: AbstractFileSystem, protocol: str, folder: Path, root: str, names: Sequence[str]
) -> None:
    """Write files of the folder below `root`, several at once, and again if that fails."""
    pairs = [(str(folder / name), f"{root}/{name}") for name in names]

    def attempt() -> None:
        place: Any = fs.resolve_path(root) if protocol == "hf" else None
        if hasattr(place, "repo_id"):  # else it is a bucket
            from huggingface_hub import HfApi  # slow to import

            # One commit for many files: fsspec's driver makes one for each.
            HfApi(endpoint=fs.endpoint, token=fs.token).upload_folder(
                repo_id=place.repo_id,
                repo_type=place.repo_type,
                revision=place.revision,
                folder_path=folder,
                path_in_repo=place.path_in_repo or None,
                allow_patterns=list(names),
                commit_message=f"Upload {names[-1]} and {len(names) - 1} more files",
            )
        elif fs.async_impl:
            fs.put(*map(list, zip(*pairs, strict=True)))
        else:  # some drivers' `put` takes one file, and some need the folder
            for source, target in pairs:
                if protocol not in _NO_FOLDERS:
                    fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                fs.put_file(source, target)

    if names:
        again(attempt)
