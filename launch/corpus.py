"""Preparing a corpus as a person sees it: progress, then what it holds."""

from __future__ import annotations

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from launch.progress import stages
from launch.tables import corpus_lines, show


def prepare_shown(config: CorpusConfig) -> None:
    """Prepare, or find up to date, and say which."""
    before = (config.output / "manifest.json").exists()
    with stages() as progress:
        manifest = prepare(config, progress)
    # A finished corpus is never overwritten: what was there and passed is what was asked for.
    show(corpus_lines(config.output, manifest, "up to date" if before else "done"))
