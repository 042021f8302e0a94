"""Prepare: make packed shards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.examples.examples_config import ExamplesConfig
from data_prep.pipeline.finished import check_folders
from data_prep.tokens.loading import refuse_path
from launch.console import counts, keep_going, show, stages
from launch.stage_keys import ExamplesKeys, PrepareKeys
from launch.stages.stage import How, Made, Stage, State, real
from pretrain.contracts.process import ExitCode
from pretrain.plan import Planned

if TYPE_CHECKING:
    from data_prep.pipeline.engines import Engine
    from data_prep.shards import Manifest


_VOCABULARY = 30522  # words of a task's tokenizer, for an estimate of the disk


class _Shards(Stage):
    """Make shards, or find them up to date."""

    def reads(self) -> dict[str, str]:
        """Return the tokenizer's model, if it is one."""
        tokenizer = self.config.tokenizer
        return {"tokenizer": tokenizer} if isinstance(tokenizer, str) else {}

    def state(self) -> State:
        """Return whether all folders have a manifest."""
        folders = self.outputs()
        if all((folder / "manifest.json").exists() for folder in folders):
            return "done"
        return "begun" if any(folder.exists() for folder in folders) else "new"

    def result(self) -> str:
        """Return the rows of each folder."""
        return "; ".join(_rows(folder) for folder in self.outputs())

    def check_tokenizer(self, made: Made) -> bool:
        """Refuse a path that is not there; return whether an earlier stage is yet to make it."""
        tokenizer = self.config.tokenizer
        missing = isinstance(tokenizer, str | Path) and not Path(tokenizer).exists()
        if missing and real(tokenizer) not in made:
            refuse_path(tokenizer)
        return missing and real(tokenizer) in made


class Prepare(_Shards):
    """Make shards of a corpus, or find them up to date."""

    keys, of = PrepareKeys, CorpusConfig

    @property
    def title(self) -> str:
        """Return the number of sources."""
        return f"shards of {len(self.config.sources)} source(s)"

    def outputs(self) -> list[Path]:
        """Return a folder for each row length."""
        return [self.config.folder(length) for length in self.config.row_lengths]

    def check(self, made: Made, how: How, *, dry_run: bool) -> tuple[Made, list[str]]:
        """Find the inputs of each source; they may be made by no stage."""
        config = self.config
        later = self.check_tokenizer(made)
        lines = []
        for source in config.sources:
            inputs = source.inputs(1 << 30)
            lines.append(f"{source.label}: {len(inputs):,} input(s)")
        # A finished corpus is compared in its turn.
        rows: dict[int, Planned] = {}
        if self.state() != "done":
            check_folders(config)
            if dry_run and not later:
                rows = self._estimate(lines)
        folders = zip(config.row_lengths, self.outputs(), strict=True)
        return {real(folder): rows.get(length) for length, folder in folders}, lines

    def _estimate(self, lines: list[str]) -> dict[int, Planned]:
        """Return the rows of each length by a sample of the sources; `lines` gets what to say."""
        from rich.filesize import decimal

        from data_prep.estimate import estimate
        from data_prep.messages import duration

        found, config = estimate(self.config), self.config
        tokens = sum(source.tokens for source in found.sources)
        rows = {n: sum(s.rows[n] for s in found.sources) for n in config.row_lengths}
        lines.append(
            f"about {tokens:,} tokens in "
            + ", ".join(f"{num:,} rows x {length}" for length, num in rows.items())
            + f"; {decimal(found.shard_bytes)} of shards, {duration(found.seconds)} with "
            f"workers={config.workers}"
        )
        return {n: Planned(max(1, num), tokens, n, found.vocab_size) for n, num in rows.items()}

    def run(self, how: How) -> int:
        """Run the stages of the corpus that are not up to date."""
        try:
            prepare_and_show(self.config, accept_code=how.accept_code)
        except CorpusError as error:
            # `distil prepare` takes no recipe.
            text = str(error).replace("distil prepare CONFIG", "distil recipe RECIPE")
            raise CorpusError(text) from error
        return ExitCode.DONE


class Examples(_Shards):
    """Make shards of a task's data, or find them up to date."""

    keys, of = ExamplesKeys, ExamplesConfig

    @property
    def title(self) -> str:
        """Return the kind of examples."""
        return f"examples of {self.config.task.name}"

    def reads(self) -> dict[str, str]:
        """Return the tokenizer's model, if it is one, and shards without labels."""
        spare = self.config.unlabelled
        return super().reads() | ({"unlabelled": str(spare)} if spare is not None else {})

    def check(self, made: Made, how: How, *, dry_run: bool) -> tuple[Made, list[str]]:
        """Find the tokenizer and the files; no stage makes files of labels."""
        config = self.config
        later = self.check_tokenizer(made)
        lines = []
        for split, path in config.files().items():
            if not path.exists():
                raise CorpusError(f"{split} {path}: no such file or folder: check the path")
            lines.append(f"{split}: {path}")
        rows = None
        if dry_run and self.state() != "done" and not later:
            from data_prep.examples.making import expected

            num, tokens = expected(config)
            spare = config.unlabelled and made.get(real(config.unlabelled))
            if isinstance(spare, Planned):
                num, tokens = num + spare.rows, tokens + spare.tokens
            rows = Planned(num, tokens, config.max_length, _VOCABULARY)
            lines.append(f"train: about {rows.rows:,} rows, {rows.tokens:,} tokens")
        return {real(config.output): rows}, lines

    def run(self, how: How) -> int:
        """Make them, or compare the finished ones."""
        examples_and_show(self.config)
        return ExitCode.DONE


def _rows(folder: Path) -> str:
    from data_prep.shards import load_manifest

    if not (folder / "manifest.json").exists():
        return "not finished"
    manifest = load_manifest(folder)
    train = manifest.splits["train"]
    return f"{train.rows:,} rows x {manifest.row_length}, {train.tokens:,} tokens"


def prepare_and_show(
    config: CorpusConfig, engine: Engine = "processes", accept_code: bool = False
) -> None:
    """Run all stages, or find the corpus up to date, and print what it holds."""
    from data_prep.messages import duration, warn
    from data_prep.pipeline.processes import keep_large_blocks, return_large_blocks
    from data_prep.prepare import prepare as run_all_stages

    keep_going()
    return_large_blocks()
    began = time.monotonic()
    folders = [config.folder(row_length) for row_length in config.row_lengths]
    # To tell "up to date" from "done" at the end.
    before = all((folder / "manifest.json").exists() for folder in folders)
    remade: list[str] = []
    with stages() as progress:

        def remember(text: str) -> None:
            remade.append(text)
            warn(text)

        run_all_stages(config, progress, remember, engine=engine, accept_code=accept_code)
    keep_large_blocks()  # this process may train next
    kept = "kept, this code is accepted" if accept_code else "up to date"
    show_shards(config, kept if before and not remade else "done")
    show(f"this took {duration(time.monotonic() - began)}")


def examples_and_show(config: ExamplesConfig) -> None:
    """Make the shards of a task's data, or find them up to date, and print what they hold."""
    from data_prep.examples.making import make_examples
    from data_prep.messages import warn

    keep_going()
    manifest, was_there = make_examples(config, warn)
    rows = [split.rows for split in manifest.splits.values()]
    lines = [
        f"{source.name}: {source.documents_in:,} examples, {number:,} rows x {manifest.row_length}"
        + counts("with", source.noted)
        for source, number in zip(manifest.sources, rows, strict=True)
    ]
    if manifest.labels:
        lines.append(f"labels: {', '.join(manifest.labels)}")
    state = "up to date" if was_there else "done"
    show(*lines, f"{config.output}: {state}, digest {manifest.digest[:16]}")


def show_shards(config: CorpusConfig, state: str) -> None:
    """Print what the finished shards of each row length hold."""
    from data_prep.shards import load_manifest

    for row_length in config.row_lengths:
        folder = config.folder(row_length)
        show(*corpus_lines(folder, load_manifest(folder), state))


def corpus_lines(folder: Path, manifest: Manifest, state: str) -> list[str]:
    """Return a line for each split and each source of a prepared corpus."""
    from data_prep.pipeline.stages.finish import held_out
    from data_prep.prepare import unknown_of
    from data_prep.shards.manifest import too_short

    lines = []
    for name, split in manifest.splits.items():
        full = split.tokens / max(1, split.rows * manifest.row_length)
        lines.append(
            f"{name}: {split.rows:,} rows x {manifest.row_length}, {split.tokens:,} tokens, "
            f"{full:.1%} full, {len(split.shards)} shard(s)"
        )
    if not manifest.has_labels:
        documents, tokens = held_out(manifest)
        lines.append(f"held out: {documents:.1%} of the documents, {tokens:.1%} of the tokens")
        lines.append(f"unknown: {unknown_of(folder, manifest).share:.3%} of the tokens")
    for source in manifest.sources:
        lines.append(
            f"{source.name}: {source.documents_in:,} documents, {source.documents_kept:,} kept"
            + counts("dropped", source.dropped)
            + counts("noted", source.noted)
            + counts("markup left", source.leftovers)
            + counts("share text with", source.contaminated)
        )
    for file, record in manifest.evaluation.items():
        lines.append(
            f"{file}: {record.texts:,} evaluation texts, {too_short(record)} too short to be found"
        )
    if manifest.normaliser:
        size = manifest.tokenizer.vocab_size
        lines.append(f"tokenizer: {size:,} entries, {manifest.normaliser}")
    return [*lines, f"{folder}: {state}, digest {manifest.digest[:16]}"]
