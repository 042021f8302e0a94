"""Implement `distil config`: explain the keys of a config file, and show what a file says."""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from launch.commands import Config, Overrides

if TYPE_CHECKING:
    from data_prep.keys import Keys

config = typer.Typer(
    no_args_is_help=True, help="Explain the keys of a config file; show and compare files."
)
Kind = Literal["run", "corpus", "examples", "recipe"]


@config.command("keys")
def keys(
    prefix: Annotated[
        str, typer.Argument(help="Only keys with a part that begins so: train, or learning_rate.")
    ] = "",
    kind: Annotated[Kind | None, typer.Option(help="Only keys of such a file.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/config.md.")] = False,
) -> None:
    """Explain each key: what it takes, its default, and what it does.

    Example: distil config keys train
    """
    from launch import reference
    from launch.console import show
    from pretrain import RunError

    if markdown:
        if prefix or kind:
            raise RunError("--markdown: prints the whole page; leave out the others")
        typer.echo(reference.markdown(), nl=False)
        return
    # As messages name a key: runs.0.train.seed, defaults.train.
    prefix = re.sub(r"^(defaults\.|runs\.\d+\.)|\.\d+(?=\.|$)", "", prefix)
    found = False
    for each in [kind] if kind else reference.KINDS:
        group = None
        for key in reference.keys(each):
            if not key.path.startswith(prefix) and f".{prefix}" not in f".{key.path}":
                continue
            if group != (each, key.section):
                group = each, key.section
                with_ = f", with {key.section}" if key.section else ""
                show(textwrap.fill(f"{reference.COMMANDS[each]} ({each}){with_}:", 80))
            default = f"; default {key.default}" if key.default not in ("", "required") else ""
            needed = "; required" if key.default == "required" else ""
            head = f"{key.path}: {key.values}{default}{needed}"
            show(textwrap.fill(head, 80, initial_indent="  ", subsequent_indent="    "))
            for line in textwrap.wrap(key.text, 74):
                show(f"      {line}")
            found = True
    if not found:
        parts = {
            p for k in reference.KINDS for key in reference.keys(k) for p in key.path.split(".")
        }
        close = difflib.get_close_matches(prefix, sorted(parts), n=1)
        hint = f"did you mean {close[0]}?" if close else "distil config keys shows all"
        raise RunError(f"{prefix}: no part of a key begins so; {hint}")


@config.command("schema")
def schema(
    kind: Annotated[Kind, typer.Option(help="Of which kind of file.")] = "run",
) -> None:
    """Print the JSON schema of a kind of file, with which an editor completes and checks keys.

    Example: distil config schema --kind recipe > recipe.schema.json
    """
    from launch import reference

    typer.echo(json.dumps(reference.schema(kind), indent=1))


@config.command("show")
def show_file(
    file: Config,
    overrides: Overrides = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Also keys that the file leaves at their default.")
    ] = False,
    diff: Annotated[
        Path | None,
        typer.Option(help="Show what differs in another file, or in the config of a run's folder."),
    ] = None,
) -> None:
    """Check a file, and print its keys as they are read, overrides included.

    Sweeps and defaults of a recipe are written out: this is for reading. Passwords are left out.

    Example: distil config show configs/demo.yaml --diff runs/demo
    """
    from data_prep.disk.credentials import masked
    from data_prep.keys import Keys
    from launch.config import as_yaml
    from pretrain import RunError
    from pretrain.config import RunConfig
    from pretrain.run_folder import flatten

    ours = loaded(file, overrides or [])
    if diff is None:
        values = ours.model_dump(mode="json", exclude_unset=not resolved)
        # What a run leaves out of the config that it keeps: its job, and sections at their default.
        for name, own in ours if isinstance(ours, RunConfig) else ():
            if name not in values:
                if isinstance(own, Keys):
                    own = own.model_dump(mode="json", exclude_defaults=not resolved)
                if resolved or (own and name in ours.model_fields_set):
                    values[name] = own
        typer.echo(masked(as_yaml(values)), nl=False)
        return
    if resolved:
        raise RunError("--diff: compares all values; leave out --resolved")
    theirs = loaded(diff, [])
    if type(ours) is not type(theirs):
        raise RunError(f"--diff {diff}: is a different kind of file than {file}")
    here, there = (flatten(each.model_dump(mode="json")) for each in (ours, theirs))
    for key in dict.fromkeys([*here, *there]):
        before, after = (json.dumps(x[key]) if key in x else "-" for x in (here, there))
        if before != after:
            typer.echo(masked(f"{key}: {before} -> {after}"))


def loaded(path: Path, overrides: list[str]) -> Keys:
    """Return the config in a file of any kind, or in a run's folder."""
    from launch.config import kind_of, load_config
    from pretrain import RunError

    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise RunError(f"{path}: a folder without a config.json; give a file, or a run's folder")
    return load_config(kind_of(file, overrides), file, overrides)
