"""Implement `distil export`: write a checkpoint for transformers."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from launch.commands import quiet
from launch.console import keep_going


def export(
    run: Annotated[
        str,
        typer.Argument(help="The output folder of a run; with --onnx any model.", metavar="RUN"),
    ],
    folder: Annotated[Path, typer.Argument(help="Where to write the checkpoint.")],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Add onnx/model.onnx, checked against PyTorch.")
    ] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="Add onnx/model_quantized.onnx, if it is good enough.")
    ] = False,
    fp16: Annotated[bool, typer.Option("--fp16", help="Add onnx/model_fp16.onnx.")] = False,
    max_drop: Annotated[
        float,
        typer.Option(help="How far int8 may fall: masked accuracy or correlation, of 1."),
    ] = 0.005,
    data: Annotated[
        Path | None,
        typer.Option(
            help="What ONNX files are measured on: shards, or a table of pairs with scores. By "
            "default the run's shards."
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(help="Upload to this repository; the token: HF_TOKEN or `hf auth login`."),
    ] = None,
) -> None:
    """Write a checkpoint that plain transformers loads, with tokenizer and model card.

    ONNX files run without torch; the card has the lines. int8 is measured on up to 2,000 documents
    or pairs, and refused if it falls by more than --max-drop.

    Example: distil export runs/distilbert-base-uncased exported/my-distilbert --int8
    """
    # transformers imports DeepSpeed where it is installed, which then warns that there is no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    keep_going()

    from data_prep.messages import warn
    from launch.console import show
    from pretrain import RunError
    from pretrain.export.asked import Onnx, check_onnx, check_repository, check_target, hub_token
    from pretrain.run_folder import check_run, is_run, sealed_state

    token = ""
    if push is not None:
        check_repository(push)
        token = hub_token()
    check_target(Path(run), folder, again=push is not None)
    wanted = None
    if onnx or int8 or fp16:
        wanted = check_onnx(run, Onnx(int8, fp16, max_drop, data))
    elif data is not None:
        raise RunError("--data: is for ONNX files; add --onnx or --int8")
    if wanted is None or is_run(Path(run)):
        check_run(Path(run))

    # torch takes seconds to import: a mistake is answered before.
    from pretrain.export.export import export as write
    from pretrain.export.export import export_model
    from pretrain.export.export import push as upload
    from pretrain.model.folder import digests

    quiet()
    # An export that is ended removes what it has begun.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if wanted is None or is_run(Path(run)):
        exported = write(
            Path(run), folder, warn, same=digests if push else None, onnx=wanted, say=show
        )
    else:
        exported = export_model(run, folder, wanted, warn, show)
    _, state = sealed_state(Path(run)) or (None, {})
    whole = state.get("num_steps", exported.step)
    show(
        f"{folder}: {exported.architecture}, {exported.num_parameters:,} parameters, "
        f"{exported.num_bytes:,} bytes, from step {exported.step:,}"
        + f" of {whole:,}: unfinished"
        * (exported.step < whole),
        f"read back: outputs differ by at most {exported.difference:.1e}",
    )
    if push is not None:
        show(upload(folder, push, token))
