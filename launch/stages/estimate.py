"""Estimate what a run takes of a machine, for `--dry-run`: memory, network, disk and hours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.filesize import decimal

from data_prep.messages import duration
from data_prep.shards import load_manifest
from data_prep.shards.manifest import MANIFEST
from launch.stages.stage import Made, real
from launch.torchrun.hardware import Device, cores, hardware
from pretrain import RunError
from pretrain.config import RunConfig, accumulation_steps, with_defaults
from pretrain.contracts.terms import Sizes
from pretrain.device.fitting import largest, sizes
from pretrain.device.footprint import Footprint
from pretrain.device.precision import check_precision
from pretrain.model.architectures import TRANSFORMERS, architecture_of, longest_row
from pretrain.model.config_file import read_config
from pretrain.model.hub import config_file
from pretrain.plan import Plan, Planned, plan
from pretrain.run_folder import sealed_state

if TYPE_CHECKING:
    from launch.torchrun.start import Launch

_LEFT_FREE = 0.08  # share of the memory, as `micro_batch_size: auto` leaves
_ROW = 512, 30522  # length and vocabulary, where no model is known: BERT's
_OF_PYTHON = 1e9  # bytes of a process on a CPU besides tensors
_NETWORK = 25e9 / 8  # bytes/s between nodes, for the time that gradients take
_STEP = 0.02  # seconds of a GPU's step, whatever the sizes: hundreds of kernels are started


class Target(NamedTuple):
    """Hold the machine of a run."""

    name: str
    device: Device
    nodes: int
    processes: int  # on each node
    memory: float | None  # bytes of a process for tensors; None where it is not known
    rates: tuple[float, float] | None  # FLOP/s of all, at best and at worst; None if not known

    @property
    def world(self) -> int:
        """Return the number of processes."""
        return self.nodes * self.processes


def target(asked: Launch | None, *, everywhere: bool = True) -> Target:
    """Return the machine that options ask for, or this one; on all nodes or one."""
    preset = hardware(asked.hardware) if asked and asked.hardware else None
    nodes = asked.nodes if asked and everywhere else 1
    device: Device = preset.device if preset else "cpu"
    if preset is None:
        import torch

        if torch.cuda.is_available():
            total, gpus = torch.cuda.mem_get_info()[1], torch.cuda.device_count()
            processes = (asked.gpus or gpus) if asked else 1
            name = torch.cuda.get_device_name()
            return Target(name, "cuda", nodes, processes, total * (1 - _LEFT_FREE), None)
        if asked and (asked.nodes > 1 or asked.slurm):  # other nodes, which have GPUs: not known
            return Target("other nodes", "cuda", nodes, asked.gpus or 1, None, None)
        preset = hardware("cpu")
    processes = (asked.gpus if asked else None) or preset.processes
    if device == "cpu":
        import psutil

        memory = psutil.virtual_memory().total / processes - _OF_PYTHON
        rate = preset.rate * cores() * nodes
        rates = rate, rate
        name = f"{nodes} nodes, each a " * (nodes > 1) + f"cpu with {cores()} core(s)"
        return Target(name, device, nodes, processes, memory, rates)
    memory = preset.memory * (1 - _LEFT_FREE)
    name = preset.name if processes == preset.processes else f"{processes} GPU(s) of {preset.name}"
    name = f"{nodes} nodes of {name}" if nodes > 1 else name
    rates = preset.rate * nodes * processes, preset.slow * nodes * processes
    return Target(name, device, nodes, processes, memory, rates)


def on_hardware(config: RunConfig, asked: Launch | None) -> RunConfig:
    """Return a run with the precision and micro-batch of the hardware that is asked for."""
    if asked is None or asked.hardware is None:
        return config
    preset = hardware(asked.hardware)
    return config.with_train(precision=preset.precision, micro_batch_size=preset.micro_batch_size)


def run_lines(config: RunConfig, asked: Launch | None, *, tokens: float | None = None) -> list[str]:
    """Return what a run would do, and what it would take.

    Args:
        config: with the precision and micro-batch of the hardware, if that was asked for.
        asked: the options of `distil launch`.
        tokens: of shards that do not exist yet, in full rows of the teacher's length.

    Raises:
        RunError, CorpusError: see `assumed`, `plan` and `step_lines`.
    """
    compare_models(config, {})
    made, lines = assumed(config, tokens, {})
    found = plan(config, made, needs_shards=False)
    about, least = step_lines(config, found, asked)
    costs = cost_lines([Cost(found.flop, found.disk, least)], asked, config.price_per_hour)
    return [*lines, *found.lines, *about, *costs]


def compare_models(config: RunConfig, made: Made) -> None:
    """Refuse models of other tokenizers, or a teacher without the task's head, by their files.

    A hub's models, and those that an earlier stage makes, are compared when the run starts.
    """
    if real(config.shards) in made or not (config.shards / MANIFEST).exists():
        return
    from pretrain.model.vocabulary_file import check_tokenizer

    manifest, needs = load_manifest(config.shards), config.objective.needs
    for key, name in config.sources().items():
        folder, state, who = Path(name), None, f"{key} {name}"
        if (sealed := sealed_state(folder)) is not None:
            folder, state = sealed[0] / "student", sealed[1]
        if real(name) in made or not (folder / "config.json").is_file():
            continue
        is_teacher = key == "teacher"
        if not is_teacher or config.model is None:  # else its tokenizer may be any
            same = is_teacher and config.teacher_vocabulary == "same"
            raw = read_config(who, folder)
            if (kind := raw.get("model_type", "bert")) not in TRANSFORMERS and is_teacher:
                raise RunError(f"{who}: a {kind}; supported are {', '.join(TRANSFORMERS)}")
            size = raw.get("vocab_size", manifest.tokenizer.vocab_size)
            sizes = SimpleNamespace(vocab_size=size, pad_token_id=raw.get("pad_token_id"))
            check_tokenizer(
                who, folder, sizes, manifest, config.shards, required=not same, agrees=False
            )
            if manifest.row_length > (longest := longest_row(raw)):
                raise RunError(
                    f"{who}: rows of {manifest.row_length} tokens need as many positions, but it "
                    f"has {longest}; prepare the corpus with row_length: {longest}"
                )
        if is_teacher and manifest.has_labels and config.task.has_head and needs.soft:
            from pretrain.model.task_head import labels_of
            from pretrain.tasks.labelled.examples import check_labels, config_of_head
            from pretrain.tasks.task_heads import HEADS

            if (head := HEADS.get(manifest.kind)) is not None:
                raw = config_of_head(who, folder, state, head.output)
                check_labels(who, labels_of(raw, head.output), manifest.labels)
    if config.vectors is None and config.answers is not None and config.answers.is_file():
        from pretrain.tasks.labelled.prediction import check_logits

        check_logits(config.answers, manifest, None)


def assumed(
    config: RunConfig, tokens: float | None, made: Made
) -> tuple[dict[Path, Sizes | Planned | None], list[str]]:
    """Return `made` with a run's models and shards that do not exist yet, and lines on both.

    Raises:
        RunError: a number of tokens for shards that exist.
    """
    found, lines = dict(made), list[str]()
    row_length, vocabulary = _ROW
    if config.model is not None:
        row_length = min(row_length, config.model.max_position_embeddings)
    name = config.teacher or (config.model.init if config.model is not None else None)
    if name is None or real(name) in made:
        pass
    elif (read := _read(name)) is not None:
        found[real(name)] = Sizes.of(read)
        row_length = min(row_length, read.get("max_position_embeddings", row_length))
        vocabulary = read.get("vocab_size", vocabulary)
    elif not Path(name).exists():
        lines.append(
            f"{name}: no hub answers, and no cache has it: for a plan put its config.json into "
            f"./{name}/"
        )
    if tokens is not None:
        if not tokens < 1e18:
            raise RunError(
                f"--tokens {tokens:g}: is not a number of tokens; give 4e9, for instance"
            )
        if (config.shards / "manifest.json").exists():
            raise RunError(f"--tokens: {config.shards} already exists; remove --tokens")
        rows = max(1, round(tokens / row_length))
        found[real(config.shards)] = Planned(rows, round(tokens), row_length, vocabulary)
        size = decimal(rows * row_length * (2 if vocabulary <= 2**16 else 4))
        lines.append(
            f"assumed: {tokens:,.0f} tokens in full rows of {row_length}, {vocabulary:,} words, "
            f"{size} of shards"
        )
    return found, lines


def _read(name: str) -> dict[str, Any] | None:
    """Return a model's config.json, also of a hub; None if it cannot be read."""
    try:
        if not Path(name).is_dir():
            return read_config(f"teacher {name}", config_file(name).parent)
        sealed = sealed_state(Path(name))
        return read_config(name, sealed[0] / "student" if sealed is not None else Path(name))
    except (OSError, RunError):  # a run that was not trained yet; the next step says what is wrong
        return None


class Cost(NamedTuple):
    """Hold what a stage takes."""

    flop: float | None
    disk: int
    least: float = 0.0  # seconds, whatever the FLOP/s: of the network, and of steps
    everywhere: bool = True  # do all nodes take part? Otherwise one


def cost_lines(
    costs: Sequence[Cost], asked: Launch | None, price: float | None = None
) -> list[str]:
    """Return the estimate of time, GPU-hours, price and disk of all that is known.

    Args:
        costs: of stages, in any order; what is not known is left out.
        asked: the options of `distil launch`.
        price: of an hour of a GPU, or of a node without GPUs.
    """
    known = [cost for cost in costs if cost.flop]
    if not known:
        return []
    text = f"{decimal(sum(cost.disk for cost in known))} of checkpoints"
    seconds, slow = [0.0, 0.0], False
    for cost in known:
        rates = target(asked, everywhere=cost.everywhere).rates
        if rates is None:
            return [f"estimate: {text}; for its time add --hardware NAME"]
        arithmetic = [(cost.flop or 0.0) / rate for rate in rates]
        slow |= cost.least > arithmetic[0]
        seconds = [
            total + max(cost.least, more) for total, more in zip(seconds, arithmetic, strict=True)
        ]
    where = target(asked, everywhere=any(cost.everywhere for cost in known))
    why = " (bound by its network, or by 20 ms to start a step)" * slow
    hours = " to ".join(dict.fromkeys(map(duration, seconds)))
    line = f"estimate: {hours} on {where.name}{why}, {text}"
    units, unit = where.nodes, "node"
    if where.device == "cuda" and where.rates is not None:
        units, unit = where.world, "GPU"  # a job holds all of them, also while one node works
        line += f", {_range(seconds, units / 3600, 1)} GPU-hours"
        fast, least = (rate / where.world / 1e12 for rate in where.rates)
        known_rate = f"{fast:.0f} TFLOP/s a GPU, of a step on one: docs/results/step-gpu.md"
        guess = f"{fast:.0f} to {least:.1f} TFLOP/s a GPU, not measured there; the least is the "
        guess += "share of the peak that DistilBERT's authors had on V100s"
        line += f" (at {guess if least < fast else known_rate})" * (not slow)
    if price is None:
        return [line]
    paid = _range(seconds, units / 3600 * price, 2)
    return [line, f"price: {paid}, at price_per_hour {price:g} for each {unit}"]


def _range(values: Sequence[float], factor: float, digits: int) -> str:
    """Return values times a factor with so many digits after the point: "3.1 to 250.0"."""
    shown = (f"{max(value * factor, 10**-digits):,.{digits}f}" for value in values)
    return " to ".join(dict.fromkeys(shown))


def step_lines(config: RunConfig, found: Plan, asked: Launch | None) -> tuple[list[str], float]:
    """Return the parameters, memory, work and network of a step, and the least time of all steps.

    Args:
        config: with the precision and micro-batch of the hardware, if that was asked for.
        found: its plan; without sizes or rows there is nothing to say.
        asked: the options of `distil launch`.

    Raises:
        RunError: a micro-batch does not fit; says what does.
    """
    where = target(asked)
    accumulation_steps(config, where.world)  # raises if they do not divide
    if found.student is None:
        return ["memory: known once the config.json of its models can be read"], 0.0
    if found.rows is None:
        return [f"memory: known once {config.shards} exists, or with --tokens"], 0.0
    if not architecture_of(found.student.family).attends:
        return [f"memory: no estimate for a {found.student.family}"], 0.0
    if where.memory is None:
        return ["memory: add --hardware NAME"], 0.0
    if where.memory <= 0:
        raise RunError(
            f"--gpus {where.processes}: so many processes leave no memory of this machine for "
            "tensors: give fewer"
        )
    config = with_defaults(_with_precision(config, where.device), where.device, where.world)
    share = config.train.global_batch_size // where.world
    counted = Footprint(config, found.student, found.teacher, found.rows, where.device)
    held: dict[str, int] = dict(counted.held)
    if asked is not None and asked.zero is not None:
        for part in ("AdamW", "gradients")[: asked.zero]:
            held[part] //= where.world

    def used(rows: int) -> float:
        return sum(held.values()) + counted.micro_step(rows, held=share > rows or where.world > 1)

    rows = config.train.micro_batch_size
    if not isinstance(rows, int):
        fits = largest(sizes(share), used, where.memory, multiple=8)
        if fits is None:
            raise RunError(_too_large(config, where, 1, used(1)))
        rows = fits.rows
    elif used(rows) > where.memory:
        smaller = largest(sizes(share, rows - 1), used, where.memory) if rows > 1 else None
        raise RunError(_too_large(config, where, rows, used(rows), smaller and smaller.rows))
    most = round(used(rows))
    parts = {**held, "a micro-step": most - sum(held.values())}
    teacher = counted.teacher
    lines = [
        f"parameters: {counted.student / 1e6:.1f} M of the student"
        + f", {teacher / 1e6:.1f} M of the teacher" * (teacher > 0),
        f"memory: {decimal(most)} of {decimal(round(where.memory))} for a process on "
        f"{where.name} with micro-batches of {rows} rows ("
        + ", ".join(f"{name} {decimal(size)}" for name, size in parts.items())
        + ")",
        f"a step: {config.train.global_batch_size:,} rows = {rows} x {share // rows} micro-batches "
        f"x {where.world} process(es), {config.train.precision}"
        f", {decimal(round(found.step_flop or 0)).rpartition('B')[0]}FLOP",
    ]
    step = _STEP if where.device == "cuda" else 0.0
    if where.world > 1:
        sent = 2 * (where.world - 1) / where.world * 4 * counted.student
        line = f"network: a process sends {decimal(round(sent))} of gradients a step"
        if where.nodes > 1:
            step = max(step, seconds := sent / _NETWORK)
            line += f": {seconds:.2g} s between nodes at 25 Gbit/s, "
            line += f"{duration(seconds * found.steps)} in all; where arithmetic takes less, the "
            line += "network decides"
        lines.append(line)
    return lines, step * found.steps


def _with_precision(config: RunConfig, used: Device) -> RunConfig:
    """Replace `precision: auto` by this machine's choice, or check another for its device."""
    if config.train.precision != "auto":
        try:
            check_precision(config.train.precision, used)
        except RunError as error:
            raise RunError(f"{error}, or name another machine with --hardware") from None
        return config
    import torch

    from pretrain.device.precision import choose

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return config.with_train(precision=choose(device)[0])


def _too_large(
    config: RunConfig, where: Target, rows: int, used: float, fits: int | None = None
) -> str:
    """Return what does not fit, and what would."""
    text = (
        f"train.micro_batch_size {rows}: a process would take {decimal(round(used))}, and one on "
        f"{where.name} has {decimal(round(where.memory or 0))}: "
    )
    if where.device == "cpu" and where.processes > 1:
        text += "give fewer --gpus, or "
    if fits:
        return text + f"take {fits}, which trains the same"
    if not config.train.activation_checkpointing:
        return text + "set train.activation_checkpointing: true, or take shorter rows"
    return text + "take shorter rows, a smaller student or another machine"
