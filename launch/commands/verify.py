"""Implement `distil verify`: check a prepared corpus."""

from __future__ import annotations

from launch.commands import Shards


def verify(folder: Shards) -> None:
    """Check every file of a prepared corpus against its manifest.

    Example: distil verify shards/wikipedia-books
    """
    from data_prep import CorpusError
    from data_prep.shards import load_manifest
    from data_prep.shards import verify as find_problems
    from launch.console import show

    problems = find_problems(folder)
    if problems:
        raise CorpusError("\n       ".join(problems))
    manifest = load_manifest(folder)
    shards = sum(len(split.shards) for split in manifest.splits.values())
    show(f"{folder}: {shards} shard(s) and {len(manifest.files)} other files are whole")
