"""Implement `distil vectors`: write the file of vectors that a run learns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from launch.commands import Shards, quiet


def vectors(
    shards: Shards,
    model: Annotated[
        str | None,
        typer.Option(help="A sentence encoder: a folder, a hub's name or name@revision."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The file; by default beside the shards.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Before every text; or the name of a prompt of the model's folder."),
    ] = None,
    dim: Annotated[
        int | None, typer.Option(help="Keep so many numbers of a vector.", min=1)
    ] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"], typer.Option(help="Of the model's weights.")
    ] = "fp32",
    table: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="A Parquet file with the columns text and vector, in place of a model; --model "
            "then only names who made them.",
            metavar="FILE",
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            "--write-texts",
            help="Write the texts to this Parquet file, and no vectors.",
            metavar="FILE",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code of the model's folder; off by default."),
    ] = False,
) -> None:
    """Compute a teacher's vectors of a corpus once, for later runs with `vectors:`.

    sentence-transformers makes them as the model's folder says. A killed command continues where it
    was. The corpus needs keep_text: true; its tokenizer and the student's sizes are free.

    Example: distil vectors shards/mine --model intfloat/multilingual-e5-small --prompt 'query: '
    """
    from data_prep.shards import Segments, load_manifest, open_shards
    from launch.console import show
    from pretrain import RunError

    manifest = load_manifest(shards)
    given = {"--output": output, "--model": model, "--dim": dim, "--from": table}
    given |= {"--prompt": prompt, "--trust-remote-code": trust_remote_code or None}
    given["--precision"] = None if precision == "fp32" else precision
    of_others = [name for name, value in given.items() if value is not None]
    if texts is not None and of_others:
        raise RunError(f"{of_others[0]}: --write-texts writes no vectors; leave one of them out")
    if texts is None and table is None and model is None:
        raise RunError(
            "distil vectors SHARDS: give --model NAME, --from FILE or --write-texts FILE"
        )
    if table is not None:
        for name in ("--prompt", "--precision", "--trust-remote-code"):
            if name in of_others:
                raise RunError(f"{name}: is for a model; the vectors of --from are made")
        if not table.is_file():
            raise RunError(f"--from {table}: is not a file")
    if not manifest.has_texts:
        raise RunError(f"{shards}: keeps no texts; prepare the corpus with keep_text: true")
    target = output or shards.with_name(f"{shards.name}.vectors.safetensors")
    from pretrain.run_folder import check_answers_path

    check_answers_path(
        "vectors", texts or target, target.parent / "no run", {"shards": [str(shards)]}
    )
    splits: dict[str, Segments] = {
        name: Segments(open_shards(shards, name)) for name in manifest.splits
    }

    # torch takes seconds to import: a mistake is answered before.
    quiet()
    from pretrain.tasks.embedding.makers import FromModel, FromTable, write_texts
    from pretrain.tasks.embedding.vectors import (
        CODE,
        Metadata,
        check_vectors,
        read_record,
        write_vectors,
    )

    if texts is not None:
        show(f"{texts}: {write_texts(texts, splits):,} texts, in the column text")
        return
    maker: Any
    if table is not None:
        maker = FromTable(table, splits, dim=dim, name=model or "")
    else:
        maker = FromModel(
            str(model),
            prompt=prompt,
            dim=dim,
            precision=precision,
            trust_remote_code=trust_remote_code,
        )
    record = Metadata(
        shards=manifest.digest,
        teacher=maker.digest,
        name=maker.name,
        normalised="true" if maker.normalised else "",
        code=CODE,
        precision=maker.precision,
    )
    if table is None:
        show(f"before every text: {repr(maker.prompt) if maker.prompt else 'nothing'}")
    if target.exists():
        found, width = read_record(target, manifest, record.teacher)
        check_vectors(target, found, splits)
        if not found.teacher:
            raise RunError(f"{target}: another program wrote it; give another --output")
        show(f"{target}: up to date")
    else:
        write_vectors(target, record, splits, maker, maker.width, show)
        # What training will read, from the file.
        found, width = read_record(target, manifest, record.teacher)
        check_vectors(target, found, splits)
        if maker.num_cut:
            show(f"note: {maker.num_cut:,} texts were cut to {maker.longest:,} tokens")
    lengths = "of length 1" if record.normalised else "of any length"
    show(
        f"{target}: vectors of {width} numbers, {lengths}; in the config of a run:",
        f"vectors: {target}",
    )
