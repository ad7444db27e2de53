"""transformers' Trainer trains like a plain loop: tiny BERTs and a GPT-2 built from configurations."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import SequentialSampler, default_collate

from kfac_optim import KFACLAMB
from tests.helpers.compare import assert_close, assert_identical, values
from tests.helpers.frameworks import LIMIT, PAPER, TOL, as_torchrun, assert_ranks_are_one, forget
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64, KINDS

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import transformers

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_accelerate")]

STEPS, BATCH, LENGTH, VOCABULARY, CLASSES = 8, 8, 6, 11, 3
DECAY = 0.1
Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


# Models and data -----------------------------------------------------------------------------------------------------


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_inner": 8}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **dropout, **ends))
    else:
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, max_position_embeddings=LENGTH, num_labels=CLASSES, **sizes, **dropout
        )
        masked = name == "masked"
        model = transformers.BertForMaskedLM(config) if masked else transformers.BertForSequenceClassification(config)
        # Their loss is the mean over the labels of the call whatever the Trainer passes, but their forward takes any
        # keyword, which the Trainer takes for a promise to divide by its count.
        model.accepts_loss_kwargs = False
    return model.to(dtype).train()


def examples(name: str, equal: bool = False) -> list[dict[str, Tensor]]:
    """The examples of all steps. Half of the labels are masked: in every example (``equal``), or by chance."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS * BATCH):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        if equal:
            labels[1 + torch.randperm(LENGTH - 1, generator=generator)[: LENGTH // 2]] = -100
        else:
            labels[torch.rand(LENGTH, generator=generator) < 0.5] = -100
        if name == "gpt2":  # the Trainer counts it, and the loss leaves it out
            labels[0] = -100
        if name == "classifier":
            labels = tokens[0] % CLASSES
        # Without these one row of positions is broadcast over the examples, which then can't be told apart.
        found.append({"input_ids": tokens, "labels": labels, "position_ids": torch.arange(LENGTH)})
    return found


def label_count(inputs: Any, output: Any) -> int:
    """How many labels the loss of a language model is the mean of."""
    return int((inputs["labels"] != -100).sum())


TERMS: dict[str, dict[str, Any]] = {
    "masked": {"loss_average": label_count},
    "gpt2": {"loss_average": label_count},
    "classifier": {},
}


def keywords(kind: str, name: str, **options: Any) -> dict[str, Any]:
    return {**PAPER, **KINDS[kind][1], **TERMS[name], **options}


# The two loops -------------------------------------------------------------------------------------------------------


class InOrder(transformers.Trainer):
    """Takes the examples in their order."""

    def _get_train_sampler(self, *args: Any, **keywords: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def trainer(
    model: nn.Module, folder: Path, data: list[dict[str, Tensor]], made: dict[str, Any], **options: Any
) -> transformers.Trainer:
    """A quiet Trainer; ``made`` is ``optimizers`` or ``optimizer_cls_and_kwargs``."""
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    options = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "weight_decay": DECAY,
        "save_strategy": "no",
        "remove_unused_columns": False,
        "use_cpu": True,
        **quiet,
        **options,
    }
    arguments = transformers.TrainingArguments(str(folder), **options)
    return InOrder(model, arguments, train_dataset=data, data_collator=default_collate, **made)


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[dict[str, Tensor]],
    clip: float = 1.0,
    autocast: bool = False,
    loss: Loss = own_loss,
) -> nn.Module:
    """What the Trainer does: its linear schedule, and clipping at 1."""
    before = values(model)
    scheduler = transformers.get_scheduler("linear", optimizer, 0, STEPS)
    for step in range(STEPS):
        batch = default_collate(data[step * BATCH : (step + 1) * BATCH])
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = loss(model, batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
    changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert sum(changed) >= len(changed) - 2, "a model that stood still proves nothing"
    return model


def split_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The Trainer's two groups, which take weight and bias of a layer apart."""
    plain = [p for p in model.parameters() if p.dim() == 1]  # biases and norm layers
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]


# Ways to hand over the optimizer -------------------------------------------------------------------------------------


@pytest.mark.fast("^sgd-1")
@pytest.mark.parametrize("clip", [1.0, 0.05])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers(kind: str, clip: float, tmp_path: Path) -> None:
    """``optimizers=(ours, None)``, a masked language model that returns its loss, a tiny BERT."""
    model, twin, data = make("masked"), make("masked"), examples("masked")
    optimizer = KINDS[kind][0](model, **keywords(kind, "masked"))
    trainer(model, tmp_path, data, {"optimizers": (optimizer, None)}, max_grad_norm=clip).train()
    assert_identical(model, plain(twin, KINDS[kind][0](twin, **keywords(kind, "masked")), data, clip))
    assert not list(tmp_path.iterdir())


@pytest.mark.fast("^sgd")
@pytest.mark.parametrize("kind", KINDS)
def test_class_and_keywords_with_the_trainer_s_groups(kind: str, tmp_path: Path) -> None:
    """Without a model among the keywords the class gets two groups, with and without decay."""
    kfac, options = KINDS[kind][0], {**keywords(kind, "masked"), "weight_decay": 0.5}  # which the groups override
    model, twin, data = make("masked"), make("masked"), examples("masked")
    trained = trainer(model, tmp_path, data, {"optimizer_cls_and_kwargs": (kfac, options)})
    trained.train()
    assert_identical(model, plain(twin, kfac(split_groups(twin), **options), data))
    assert [group["weight_decay"] for group in trained.optimizer.param_groups] == [DECAY, 0.0]
    assert len(trained.optimizer.optimizer.curvature.layers) == 13, "the layers were found by identity"


@pytest.mark.fast("^sgd")
@pytest.mark.parametrize("kind", ["sgd", "lamb"])
def test_class_and_keywords_with_the_model(kind: str, tmp_path: Path) -> None:
    """The Trainer takes ``model`` for the first argument: one group, and the weight decay is the keywords'."""
    kfac, options = KINDS[kind][0], {**keywords(kind, "masked"), "weight_decay": 0.01}
    model, twin, data = make("masked"), make("masked"), examples("masked")
    made = {"optimizer_cls_and_kwargs": (kfac, {"model": model, **options})}
    trained = trainer(model, tmp_path, data, made)
    trained.train()
    assert_identical(model, plain(twin, kfac(twin, **options), data))
    assert [group["weight_decay"] for group in trained.optimizer.param_groups] == [0.01]


# Losses --------------------------------------------------------------------------------------------------------------


@pytest.mark.fast("^sgd-masked")
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("kind", ["sgd", "lamb"])
def test_accumulation_is_the_large_batch(kind: str, name: str, tmp_path: Path) -> None:
    """BERT's mean is divided by the number of micro-batches, GPT-2's sum by the number of all targets."""
    kfac, options = KINDS[kind][0], keywords(kind, name, **FLOAT64)
    model, twin = make(name, torch.float64), make(name, torch.float64)
    data = examples(name, equal=name == "masked")
    made = {"optimizers": (kfac(model, **options), None)}
    trainer(model, tmp_path, data, made, per_device_train_batch_size=2, gradient_accumulation_steps=4).train()
    assert_close(model, plain(twin, kfac(twin, **options), data), TOL)


def test_label_smoothing(tmp_path: Path) -> None:
    """The Trainer takes the labels out of the inputs and makes the loss itself, from the logits."""

    def smoothed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(**{**batch, "labels": None}).logits, batch["labels"], label_smoothing=0.1)

    options = keywords("sgd", "classifier", **FLOAT64)
    model, twin = make("classifier", torch.float64), make("classifier", torch.float64)
    data, kfac = examples("classifier"), KINDS["sgd"][0]
    made = {"optimizers": (kfac(model, **options), None)}
    trainer(model, tmp_path, data, made, label_smoothing_factor=0.1).train()
    assert_close(model, plain(twin, kfac(twin, **options), data, loss=smoothed), 1e-6)  # part of their sum is float32


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "lamb"])
def test_activation_checkpointing(kind: str, reentrant: bool, tmp_path: Path) -> None:
    """Layers run twice in a step, and count once."""
    kfac, options = KINDS[kind][0], keywords(kind, "masked")
    model, twin, data = make("masked"), make("masked"), examples("masked")
    made = {"optimizers": (kfac(model, **options), None)}
    how = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    trainer(model, tmp_path, data, made, **how).train()
    assert_identical(model, plain(twin, kfac(twin, **options), data))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind: str, tmp_path: Path) -> None:
    kfac, options = KINDS[kind][0], keywords(kind, "masked")
    model, twin, data = make("masked"), make("masked"), examples("masked")
    trainer(model, tmp_path, data, {"optimizers": (kfac(model, **options), None)}, bf16=True).train()
    assert_identical(model, plain(twin, kfac(twin, **options), data, autocast=True))


# Checkpoints and processes -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"), [*((kind, "optimizers") for kind in KINDS), ("lamb", "groups"), ("lamb", "model")]
)
def test_resume_from_checkpoint(kind: str, how: str, tmp_path: Path) -> None:
    """From the Trainer's own checkpoint, with a refresh under way."""
    kfac, options = KINDS[kind][0], keywords(kind, "masked", spread=2, inv_update_steps=4)
    data, models = examples("masked"), []
    for resume in (None, str(tmp_path / "checkpoint-5")):
        forget()
        model = make("masked")
        if resume is not None:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1.0)
        made: dict[str, Any] = {"optimizer_cls_and_kwargs": (kfac, dict(options))}
        if how == "optimizers":
            made = {"optimizers": (kfac(model, **options), None)}
        elif how == "model":
            made["optimizer_cls_and_kwargs"][1]["model"] = model
        saving = {"save_strategy": "steps", "save_steps": 5} if resume is None else {}
        trained = trainer(model, tmp_path, data, made, **saving)
        trained.train(resume_from_checkpoint=resume)
        if resume is None:
            assert (tmp_path / "checkpoint-5").exists()
        assert trained.optimizer.optimizer.curvature.step_count == STEPS
        models.append(model)
    assert_identical(models[1], models[0])


# The model, the micro-batches of a step, and whether the Trainer makes the optimizer.
CASES: dict[str, tuple[str, int, bool]] = {
    "masked": ("masked", 1, True),
    "classifier": ("classifier", 1, False),
    "gpt2, accumulated": ("gpt2", 2, True),
}


def all_cases(rank: int, ranks: int, folder: str) -> dict[str, list[Tensor]]:
    """As torchrun starts them: everything in one start of the processes."""
    as_torchrun(rank, ranks, ACCELERATE_USE_CPU="true")
    found = {}
    for name, (kind, parts, by_class) in CASES.items():
        forget()
        model, options = make(kind, torch.float64), keywords("lamb", kind, assignment="layer-wise", **FLOAT64)
        made: dict[str, Any] = {"optimizer_cls_and_kwargs": (KFACLAMB, options)}
        if not by_class:
            made = {"optimizers": (KFACLAMB(split_groups(model), **options), None)}
        batch = {"per_device_train_batch_size": BATCH // ranks // parts, "gradient_accumulation_steps": parts}
        trained = trainer(model, Path(folder), examples(kind, equal=True), made, ddp_backend="gloo", **batch)
        assert trained.args.world_size == ranks
        trained.train()
        found[name] = values(model)
    return found


@pytest.mark.slow
def test_two_processes_are_one_on_the_whole_batch(tmp_path: Path) -> None:
    found = run_ranks(2, all_cases, str(tmp_path), limit=LIMIT)
    for name, (kind, _, _) in CASES.items():
        model = make(kind, torch.float64)
        optimizer = KFACLAMB(split_groups(model), **keywords("lamb", kind, **FLOAT64))
        assert_ranks_are_one(found, name, plain(model, optimizer, examples(kind, equal=True)).parameters())
