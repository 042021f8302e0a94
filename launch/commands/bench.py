"""The command that measures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.commands import Overrides, quiet


def bench(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A YAML file, shipped:NAME.yaml; without one, --synthetic.", metavar="CONFIG"
        ),
    ] = None,
    overrides: Overrides = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Random weights and rows: no shards, no teacher.")
    ] = False,
    micro_batch: Annotated[
        list[int] | None,
        typer.Option(help="Rows at a time; repeatable. By default 2 and 8, on a GPU 8, 32, 64."),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable. By default the config's; else fp32 and bf16, on a GPU bf16 and fp16.",
            metavar="NAME",
        ),
    ] = None,
    kl: Annotated[
        list[str] | None,
        typer.Option(
            help="Where KL is over: all tokens or masked ones; repeatable. By default the "
            "config's, else both.",
            metavar="all|masked",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="How often each step is timed.", min=1)] = 5,
    documents: Annotated[
        bool, typer.Option("--documents", help="Also packed rows beside padded documents.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Our step as with train.compile=true.")
    ] = False,
    layers: Annotated[int, typer.Option(help="Of a synthetic teacher.", min=2)] = 12,
    width: Annotated[int, typer.Option(help="Of synthetic models.", min=8)] = 768,
    row_length: Annotated[int, typer.Option(help="Of synthetic rows.", min=8, max=4096)] = 512,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures there.", metavar="FILE")
    ] = None,
) -> None:
    """Time our step beside the usual one: same weights, rows and masks, results compared first.

    Example: distil bench --synthetic --micro-batch 2 --json bench.json
    """
    from launch.config import config_line, load_config
    from pretrain import RunError
    from pretrain.config import RunConfig

    if config is not None and (synthetic or (layers, width, row_length) != (12, 768, 512)):
        raise RunError(
            f"--synthetic, --layers, --width, --row-length: {config} has its own models and rows: "
            "leave out one or the other"
        )
    settings = load_config(RunConfig, config, overrides or []) if config else None

    # torch takes seconds to import: a mistake in the config is answered before.
    quiet()
    import torch

    from launch.bench import Settings, check, sizes_of
    from launch.bench import bench as run
    from launch.console.tables import show
    from pretrain.device.gpu import check_kernels
    from pretrain.device.precision import choose

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    on_gpu = device.type == "cuda"
    check_kernels(device)
    precisions = precision or (["bf16", "fp16"] if on_gpu else ["fp32", "bf16"])
    kl_positions = kl or ["all", "masked"]
    rows = micro_batch or ([8, 32, 64] if on_gpu else [2, 8])
    if config is not None and settings is not None:
        show([config_line(config)])
        configured = settings.train.precision
        precisions = precision or [choose(device)[0] if configured == "auto" else configured]
        if isinstance(settings.train.micro_batch_size, int):
            rows = micro_batch or [settings.train.micro_batch_size]
        kl_positions = kl or [getattr(settings.objective, "kl_positions", "all")]
        compiled |= settings.train.compile
    asked = Settings(precisions, kl_positions, rows, repeats, documents, compiled)
    check(asked, device)

    from launch import subjects  # seconds, for models

    if settings is None:
        sizes = sizes_of(layers, width, row_length)
        subject = subjects.synthetic(sizes, device, asked)
    else:
        subject = subjects.configured(settings, device, asked)
    run(subject, asked, json_file)
