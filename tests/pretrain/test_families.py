"""Compare the walk of every family with Transformers' own forward pass, one document at a time."""

import copy
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.families import CLS, SPREAD, L, build, every_family
from support.operators import Operators
from support.runs import refused, start
from support.said import Said
from support.tiny import VOCAB_SIZE, as_teacher, save_teacher, tiny_bert
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
)

from data_prep.shards import Manifest
from pretrain.contracts.packing import Packing, find_documents
from pretrain.contracts.terms import Signal
from pretrain.kernels.attention.cpu import by_document
from pretrain.kernels.attention.dispatch import masked, usable
from pretrain.model.families import FAMILIES, MaskedLM, encode, family_of, shape_of
from pretrain.model.folder import load_model
from pretrain.model.model_config import Student
from pretrain.model.student import build_student
from pretrain.model.teacher import load_teacher, parameters_sha256
from pretrain.tasks.mlm.examples import masked_batch

attention = import_module("pretrain.kernels.attention.dispatch")  # its function has this name, too

LENGTHS = [[9, 14, 6], [31], [3, 20, 1]]  # of documents in rows of 32; the rest is padding
BOUND = 1e-5


class Packed(NamedTuple):
    """Hold documents, and the same ones in packed rows."""

    documents: list[list[Tensor]]  # of each row
    ids: Tensor  # [3, L]
    packing: Packing


def pack(model: MaskedLM) -> Packed:
    """Draw documents, and pack them."""
    pad, generator = model.config.pad_token_id, torch.Generator().manual_seed(1)
    ids, documents = torch.full((len(LENGTHS), L), pad), []
    for row, lengths in enumerate(LENGTHS):
        begin, in_row = 0, []
        for length in lengths:
            document = torch.randint(10, VOCAB_SIZE, (length,), generator=generator)
            document[0] = CLS
            ids[row, begin : begin + length] = document
            in_row.append(document)
            begin += length
        documents.append(in_row)
    nothing = torch.zeros(len(ids), 0, dtype=torch.int64)
    batch = masked_batch(ids, nothing, nothing, cls_id=CLS, pad_id=pad)
    packing = find_documents(ids, batch.cu_seqlens, batch.max_length, pad_id=pad)
    return Packed(documents, ids, packing)


def last_of(model: Any, packed: Packed, **settings: Any) -> Tensor:
    """Return last hidden states [3, L, D]."""
    return encode(model, packed.ids, packed.packing, **settings).last_hidden_state


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Return the logits of hidden states by the head that training uses."""
    projected = family_of(model).projection(model, hidden.flatten(0, 1))
    return F.linear(*projected).unflatten(0, hidden.shape[:2])


def in_documents(values_BLX: Tensor) -> list[Tensor]:
    """Cut packed values into those of each document."""
    return [
        values_BLX[row, begin:end]
        for row, lengths in enumerate(LENGTHS)
        for begin, end in pairwise([sum(lengths[:i]) for i in range(len(lengths) + 1)])
    ]


@pytest.fixture(params=[by_document, masked], ids=lambda kernel: kernel.__name__)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Use one attention kernel of the two that a CPU has, wherever it can be used."""

    def only(*arguments: Any) -> list[Any]:
        found = usable(*arguments)
        return [request.param] if request.param in found else found

    monkeypatch.setattr(attention, "usable", only)
    return request.param


# --- the walk ----------------------------------------------------------------------------------


@every_family
def test_packed_documents_have_the_outputs_and_gradients_of_documents_alone(
    kind: str, kernel: Any
) -> None:
    """Compare logits, last hidden states and all gradients; no mask and no padding in theirs."""
    model = build(kind)
    theirs, packed = copy.deepcopy(model), pack(model)
    hidden = last_of(model, packed)
    logits = logits_of(model, hidden)
    assert torch.isfinite(logits).all()  # of padding, too

    generator, losses = torch.Generator().manual_seed(2), []
    found = zip(in_documents(hidden), in_documents(logits), strict=True)
    alone = [document for row in packed.documents for document in row]
    for (our_hidden, our_logits), document in zip(found, alone, strict=True):
        outputs = theirs(input_ids=document[None], output_hidden_states=True)
        last, expected = outputs.hidden_states[-1][0], outputs.logits[0]
        assert len(document) == 1 or expected.std() > SPREAD
        assert (our_logits - expected).abs().max() < BOUND * expected.std()
        assert (our_hidden - last).abs().max() < BOUND * last.std()
        weights = torch.randn(expected.shape, generator=generator)
        losses.append(((our_logits * weights).sum(), (expected * weights).sum()))

    for loss in zip(*losses, strict=True):
        torch.stack(loss).sum().backward()
    typical = torch.cat([p.grad.flatten() for p in theirs.parameters()]).square().mean().sqrt()
    for (name, one), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        size = other.grad.norm()
        if name.endswith(("key.bias", "k_lin.bias")):  # whose true gradient is 0
            size = typical
        assert size > 0 and (one.grad - other.grad).norm() < BOUND * size, name


@every_family
@pytest.mark.parametrize("change", ["epsilon", "activation", "position", "window", "rope"])
def test_the_comparison_sees_a_wrong_setting(kind: str, change: str) -> None:
    """Change one setting of a copy: its outputs are far from the right ones."""
    model, modern = build(kind), kind.startswith("modernbert")
    packed, other = pack(model), copy.deepcopy(model)
    if change == "epsilon":
        for module in other.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps += 1e-2
    elif change == "activation":
        for module in other.modules():
            for name in ("act", "activation", "intermediate_act_fn"):
                if name in module._modules:
                    setattr(module, name, torch.nn.Tanh())
    elif change == "position":
        counting = torch.arange(L).expand_as(packed.ids)
        packed = packed._replace(packing=packed.packing._replace(position_ids=counting))
    elif modern and change == "window":
        other.config.local_attention += 4
    elif modern:
        other.config.rope_parameters["sliding_attention"]["rope_theta"] *= 1.5
    else:
        pytest.skip("a setting of ModernBERT")
    with torch.no_grad():
        right, found = last_of(model, pack(model)), last_of(other, packed)
    if modern and change == "position":  # only distances within a document matter
        assert torch.allclose(found, right, atol=1e-4)
    else:
        assert (found - right).abs().max() > 100 * BOUND * right.std()


@every_family
def test_recomputed_layers_have_the_same_gradients(kind: str) -> None:
    """Draw dropout in both passes, and count what is kept for the backward pass."""
    rates = dict.fromkeys(FAMILIES[kind.removesuffix("-biases")].dropouts, 0.1)
    found = []
    for recompute in (False, True):
        model = build(kind, **rates).train()
        packed, kept = pack(model), 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = last_of(model, packed, recompute=recompute)
        hidden.square().sum().backward()
        found.append((kept, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (kept, gradients), (less, again) = found
    assert less < kept / 3 and gradients.keys() == again.keys()
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)


@every_family
def test_no_mask_on_a_gpu_in_half_precision(kind: str) -> None:
    """Run on the meta device, which uses a GPU's kernels and refuses a read."""
    model = build(kind)
    packed = pack(model)
    *tensors, longest = packed.packing
    packing = Packing(*(t.to("meta") for t in tensors), longest)
    on_meta = model.to("meta").bfloat16().train()
    with Operators() as called:
        encode(on_meta, packed.ids.to("meta"), packing).last_hidden_state.sum().backward()
    assert not any(call.returns((3, 1, L, L)) for call in called.calls)
    assert "aten._flash_attention_backward.default" in called.names


def test_a_modernbert_in_half_precision_has_the_angles_of_fp32() -> None:
    model = build("modernbert", max_position_embeddings=600)
    ids = torch.full((1, 600), 9)
    packing = find_documents(ids, torch.tensor([0, 600], dtype=torch.int32), 600, pad_id=5)
    exact = family_of(model).prepare(model, torch.zeros(1), packing).angles
    half = family_of(model).prepare(model.bfloat16(), torch.zeros(1).bfloat16(), packing).angles
    assert exact.keys() == half.keys() == {"full_attention", "sliding_attention"}
    for kind, angles in exact.items():
        assert all(torch.equal(a.bfloat16(), b) for a, b in zip(angles, half[kind], strict=True))


# --- signals -----------------------------------------------------------------------------------


def every_signal(model: MaskedLM) -> frozenset[Signal]:
    layers = range(shape_of(model).num_layers)
    inside = {Signal(kind, i) for kind in ("hidden", "query", "key", "value") for i in layers}
    return frozenset({Signal("hidden", -1)} | inside)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """Return a list to which Transformers' layers append their query, key and value.

    A model with the attention "spy" computes `sdpa`.
    """
    seen: list[tuple[Tensor, ...]] = []

    def spy(module: Any, *arguments: Any, **settings: Any) -> Any:
        seen.append(tuple(t.transpose(1, 2).flatten(2)[0] for t in arguments[:3]))
        return AttentionInterface()["sdpa"](module, *arguments, **settings)

    monkeypatch.setitem(AttentionInterface._global_mapping, "spy", spy)
    sdpa_mask = AttentionMaskInterface()["sdpa"]
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "spy", sdpa_mask)
    return seen


@every_family
def test_signals_are_what_transformers_computes_for_documents_alone(
    kind: str, attended: list[tuple[Tensor, ...]]
) -> None:
    """Compare hidden states of all layers, their queries, keys and values, and gradients."""
    model = build(kind)
    theirs, packed, needs = copy.deepcopy(model), pack(model), every_signal(model)
    theirs.set_attn_implementation("spy")
    found = encode(model, packed.ids, packed.packing, needs)
    assert found.signals.keys() == needs
    ours = {signal: in_documents(value) for signal, value in found.signals.items()}

    losses, generator = [], torch.Generator().manual_seed(4)
    num_layers = shape_of(model).num_layers
    documents = [document for row in packed.documents for document in row]
    for number, document in enumerate(documents):
        attended.clear()
        hidden = theirs(input_ids=document[None], output_hidden_states=True).hidden_states
        assert len(hidden) == num_layers + 1 and len(attended) == num_layers
        for signal in sorted(needs):
            one = ours[signal][number]
            if signal.kind != "hidden":
                other = attended[signal.layer][("query", "key", "value").index(signal.kind)]
            else:
                other = hidden[signal.layer + 1][0]
                if signal.layer == num_layers - 1:  # ModernBERT's ends with a norm
                    one = family_of(model).finish(model, one)
            assert one.shape == other.shape and other.std() > 0.1
            assert (one - other).abs().max() < BOUND * other.std(), signal
            weights = torch.randn(one.shape, generator=generator)
            losses.append(((one * weights).sum(), (other * weights).sum()))
    for loss in zip(*losses, strict=True):
        torch.stack(loss).sum().backward()
    compared = 0
    for (name, one), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        if other.grad is None:
            assert one.grad is None, name  # the head
        else:
            assert (one.grad - other.grad).norm() < BOUND * other.grad.norm(), name
            compared += 1
    assert compared > 20


@every_family
def test_signals_change_no_output(kind: str) -> None:
    """Compare the bits with and without them, and when layers are recomputed."""
    model = build(kind)
    packed, needs = pack(model), every_signal(model)
    found = encode(model, packed.ids, packed.packing, needs)
    assert torch.equal(found.last_hidden_state, last_of(model, packed))
    assert encode(model, packed.ids, packed.packing).signals == {}
    again = encode(model, packed.ids, packed.packing, needs, recompute=True)
    assert all(torch.equal(value, again.signals[signal]) for signal, value in found.signals.items())
    total = sum(value.square().sum() for value in again.signals.values())
    total.backward()
    for layer in (num := shape_of(model).num_layers, -2):
        with pytest.raises(AssertionError, match="does not have"):
            encode(model, packed.ids, packed.packing, frozenset({Signal("hidden", layer)}))
    assert num == len(family_of(model).layers(model))


# --- teachers ----------------------------------------------------------------------------------


@every_family
def test_a_saved_model_is_loaded_as_it_was(kind: str, tmp_path: Path, manifest: Manifest) -> None:
    """Save it with Transformers; load it as a teacher and as a run's student."""
    # The ids of the shards' tokenizer.
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    if kind.startswith("modernbert"):
        special |= {"cls_token_id": 2, "sep_token_id": 3}
    model = build(kind, **special)
    save_teacher(tmp_path, model)
    teacher = load_teacher(str(tmp_path), manifest)
    for loaded in (teacher.model, load_model(tmp_path)):
        assert type(loaded) is type(model)
        assert parameters_sha256(loaded) == parameters_sha256(model)
        packed = pack(model)
        with torch.no_grad():
            ours, theirs = (last_of(m, packed) for m in (loaded, model))
        assert torch.equal(ours, theirs)
    assert not teacher.model.training
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())


@every_family
def test_a_layer_too_many_and_a_missing_head_are_refused(
    kind: str, tmp_path: Path, manifest: Manifest
) -> None:
    model, family = build(kind, pad_token_id=0), FAMILIES[kind.removesuffix("-biases")]
    weights = model.state_dict()
    without_layer = build(kind, pad_token_id=0, num_hidden_layers=3)
    without_layer.save_pretrained(tmp_path, state_dict=dict(weights))
    with refused("do not fit its config.json", family.layer_prefix):
        load_model(tmp_path)
    headless = {n: t for n, t in weights.items() if not n.startswith(family.head)}
    assert len(headless) < len(weights)
    model.save_pretrained(tmp_path, state_dict=headless)
    with refused("no trained masked-language-model head", type(model).__name__):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "positions"), [("roberta", 33), ("camembert", 33), ("bert", 32), ("modernbert", 32)]
)
def test_rows_may_be_as_long_as_there_are_positions(
    kind: str, positions: int, tmp_path: Path, manifest: Manifest
) -> None:
    """Count a RoBERTa's positions from the one after padding, whose id is 0 here."""
    save_teacher(tmp_path, build(kind, max_position_embeddings=positions, pad_token_id=0))
    load_teacher(str(tmp_path), manifest)
    save_teacher(tmp_path, build(kind, max_position_embeddings=positions - 1, pad_token_id=0))
    with refused("rows of 32 tokens need as many positions, but it has 31", "row_length: 31"):
        load_teacher(str(tmp_path), manifest)


def test_a_modernbert_with_scaled_angles_is_refused(tmp_path: Path) -> None:
    model = build("modernbert")
    model.config.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": 2.0}
    model.save_pretrained(tmp_path)
    with refused("config.json cannot be used", "rope_type linear of full_attention"):
        load_model(tmp_path)


def test_a_roberta_without_padding_is_refused(tmp_path: Path) -> None:
    model = build("roberta")
    model.config.pad_token_id = None
    model.save_pretrained(tmp_path)
    with refused("pad_token_id is null"):
        load_model(tmp_path)


# --- students ----------------------------------------------------------------------------------


@every_family
def test_a_student_is_the_teacher_cut_to_its_layers(kind: str) -> None:
    """Compare every tensor, and the outputs of Transformers, with a teacher cut by hand."""
    model, layers = build(kind), (0, 4, 2) if kind == "modernbert-biases" else (0, 3, 1)
    student = build_student(
        Student(architecture="same", init=layers, dropout=0, attention_dropout=0),
        as_teacher(model),
        seed=0,
    )
    assert type(student) is type(model) and student.training
    prefix = family_of(model).layer_prefix
    weights, copied = model.state_dict(), 0
    for name, tensor in student.state_dict().items():
        if name.startswith(prefix):
            index, _, rest = name.removeprefix(prefix).partition(".")
            name, copied = f"{prefix}{layers[int(index)]}.{rest}", copied + 1
        assert torch.equal(tensor, weights[name]), name
        assert tensor.data_ptr() != weights[name].data_ptr()
    assert copied > 3 * 5

    cut = copy.deepcopy(model)
    path, _, last = prefix.removesuffix(".").rpartition(".")
    all_layers = family_of(cut).layers(cut)
    setattr(cut.get_submodule(path), last, torch.nn.ModuleList(all_layers[i] for i in layers))
    packed = pack(model)
    with torch.no_grad():
        assert torch.equal(last_of(student.eval(), packed), last_of(cut, packed))
        document = packed.documents[1][0][None]
        expected = cut(input_ids=document).logits
        assert expected.std() > SPREAD
        # As a user will load it: with what config.json says about its layers.
        assert (student(input_ids=document).logits - expected).abs().max() < BOUND * SPREAD


@every_family
def test_a_random_student_may_have_other_sizes(kind: str) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 40}
    config = Student(architecture="same", init="random", num_layers=6, **sizes)
    student = build_student(config, as_teacher(build(kind)), seed=0)
    own_names = family_of(student).own_names
    for name, size in {**sizes, "num_hidden_layers": 6}.items():
        assert getattr(student.config, own_names.get(name, name)) == size
    assert len(family_of(student).layers(student)) == 6
    assert last_of(student, pack(student)).shape == (3, L, 16)
    if kind.startswith("modernbert"):  # the kinds of its layers go on as in the teacher
        every = 3 if kind.endswith("biases") else 2
        kinds = ["sliding_attention" if i % every else "full_attention" for i in range(6)]
        assert student.config.layer_types == kinds


def test_other_sizes_need_a_random_student() -> None:
    for kind in ("bert", "distilbert", "modernbert"):
        teacher = as_teacher(build(kind))
        for name, there in (("hidden_size", 32), ("num_attention_heads", 4)):
            config = Student(architecture="same", **{name: 2})
            with refused(f"student.{name} 2: the teacher has {there}", "init: random"):
                build_student(config, teacher, seed=0)
        config = Student(architecture="same", init="random", num_attention_heads=5)
        with refused("student.hidden_size 32", "not a multiple"):
            build_student(config, teacher, seed=0)
        # The teacher's own size changes nothing.
        build_student(Student(architecture="same", hidden_size=32), teacher, seed=0)


def test_which_student_a_teacher_gets() -> None:
    for kind, architecture, expected in [
        ("bert", None, "distilbert"),
        ("bert", "distilbert", "distilbert"),
        ("bert", "same", "bert"),
        ("distilbert", None, "distilbert"),
        ("distilbert", "same", "distilbert"),
        ("roberta", None, "roberta"),
        ("xlm-roberta", "same", "xlm-roberta"),
        ("modernbert", None, "modernbert"),
    ]:
        teacher = as_teacher(build(kind, **({"layer_norm_eps": 1e-12} if kind == "bert" else {})))
        student = build_student(Student(architecture=architecture), teacher, seed=0)
        assert student.config.model_type == expected
    with refused("student.architecture distilbert: the teacher is a roberta", "same"):
        build_student(Student(architecture="distilbert"), as_teacher(build("roberta")), seed=0)


def test_the_first_layer_of_a_modernbert_stays_the_first() -> None:
    """Refuse copies that would drop or miss a norm: the first layer has none before attention."""
    teacher = as_teacher(build("modernbert"))
    for layers in ((2, 3), (0, 0), (0, 2, 0)):
        with refused("student.init: the teacher's layer", "attn_norm", "layer 0 first"):
            build_student(Student(init=layers), teacher, seed=0)
    student = build_student(Student(init=(0, 3, 3)), teacher, seed=0)
    full, local = "full_attention", "sliding_attention"
    assert student.config.layer_types == [full, local, local]
    assert student.config.global_attn_every_n_layers == 3


def test_a_modernbert_cut_shorter_keeps_the_period_of_global_layers(
    tmp_path: Path, run_config: Callable[..., dict[str, Any]]
) -> None:
    """Cut 22 layers, of which every third is global, to 7, as a published teacher would be."""
    teacher = build("modernbert", num_hidden_layers=22, global_attn_every_n_layers=3)
    student = build_student(Student(num_layers=7), as_teacher(teacher), seed=0)
    kinds = [kind == "full_attention" for kind in student.config.layer_types]
    assert kinds == [True, False, False, True, False, False, True]
    assert student.config.global_attn_every_n_layers == 3
    with refused("teacher layers [0, 3, 4, 5, 6]"):
        build_student(Student(init=(0, 3, 4, 5, 6)), as_teacher(teacher), seed=0)

    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    special |= {"cls_token_id": 2, "sep_token_id": 3}
    save_teacher(tmp_path / "teacher", build("modernbert", **special))
    said = Said()
    values = run_config(tmp_path / "run", tmp_path / "teacher", student={"num_layers": 2})
    values["train"] |= {"max_steps": 1, "global_batch_size": 2}
    start(values, progress=said)
    assert any("last layer attends to 6 tokens" in line for line in said.lines), said.lines
    windows = [line for line in said.lines if "no attention kernel with a window" in line]
    assert len(windows) == 1  # once, for student and teacher


@every_family
def test_dropouts_come_from_the_config(kind: str, tmp_path: Path) -> None:
    teacher, family = as_teacher(build(kind)), FAMILIES[kind.removesuffix("-biases")]
    first = build_student(Student(architecture="same", init="random"), teacher, seed=0)
    first.save_pretrained(tmp_path)
    rates = {"dropout": 0.25, "attention_dropout": 0.125}
    for init in ("random", "teacher", str(tmp_path)):
        config = Student(architecture="same", init=init, **rates)
        student = build_student(config, teacher, seed=0)
        assert student.training
        for key, rate in family.dropouts.items():
            assert getattr(student.config, key) == rates[rate]
        found = {m.p for m in student.modules() if isinstance(m, torch.nn.Dropout)}
        assert found == {0.25, 0.125}


# --- runs --------------------------------------------------------------------------------------


def test_a_bert_student_may_continue_from_a_folder(tmp_path: Path) -> None:
    teacher = as_teacher(tiny_bert())
    saved = build_student(Student(architecture="same"), teacher, seed=0)
    saved.save_pretrained(tmp_path)
    config = Student(architecture="same", init=str(tmp_path))
    assert parameters_sha256(build_student(config, teacher, seed=1)) == parameters_sha256(saved)
    with refused(f"{tmp_path} holds a bert, no distilbert"):
        build_student(Student(init=str(tmp_path)), teacher, seed=0)
    wider = config.model_copy(update={"hidden_size": 64})
    with refused("has hidden_size 32, but this run needs 64"):
        build_student(wider, teacher, seed=0)
