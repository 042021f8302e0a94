"""Implement `distil export`: write a checkpoint for transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from launch.commands import Run, quiet
from launch.console import keep_going


def export(
    run: Run,
    folder: Annotated[Path, typer.Argument(help="Where to write the checkpoint.")],
    push: Annotated[
        str | None, typer.Option(help="Upload to this repository; the token is HF_TOKEN's.")
    ] = None,
) -> None:
    """Write a checkpoint that plain transformers loads, with tokenizer and model card.

    Example: distil export runs/distilbert-base-uncased exported/my-distilbert
    """
    # transformers imports DeepSpeed where it is installed, which then warns that there is no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    keep_going()

    from data_prep.messages import warn
    from launch.console import show
    from pretrain.export.arguments import check_repository, check_target, hub_token
    from pretrain.run_folder import check_run

    token = ""
    if push is not None:
        check_repository(push)
        token = hub_token()
    check_target(run, folder, again=push is not None)
    check_run(run)

    # torch takes seconds to import: a mistake is answered before.
    from pretrain.export.export import export as write
    from pretrain.export.export import push as upload
    from pretrain.model.folder import digests

    quiet()
    exported = write(run, folder, warn, same=digests if push else None)
    show(
        f"{folder}: {exported.architecture}, {exported.num_parameters:,} parameters, "
        f"{exported.num_bytes:,} bytes, from step {exported.step:,}",
        f"read back: outputs differ by at most {exported.difference:.1e}",
    )
    if push is not None:
        show(upload(folder, push, token))
