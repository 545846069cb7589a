"""Training toy models: deterministic for a seed, and without work lost when it is interrupted.

Nothing random outlives an epoch: the order of its batches and its dropout are drawn from the seed and the epoch's
number alone. A checkpoint therefore needs no random state, and a resumed run ends in the same bits as one that was
never stopped (with the same libraries and number of threads).
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

IGNORED = -100
"""The label of positions that are not trained on."""
SHOW_EVERY = 25
"""Epochs between two updates of the figures beside the progress bar."""
_PATTERN = "epoch-*.safetensors"


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: AdamW on the cross-entropy of labels.

    Arguments:
        epochs: passes over the data.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        batch_size: sequences in a batch.
        seed: draws the order of batches, and dropout.
    """

    epochs: int
    learning_rate: float
    weight_decay: float
    batch_size: int
    seed: int


@dataclass(frozen=True)
class Checkpoint:
    """A stop on the way of a training run.

    Arguments:
        path: the safetensors file.
        epoch: epochs trained.
        recipe: the recipe it was trained by.
        metrics: what was measured there.
    """

    path: Path
    epoch: int
    recipe: dict[str, Any]
    metrics: dict[str, float]

    @classmethod
    def read(cls, path: Path) -> "Checkpoint":
        """Read what a checkpoint says of itself.

        Raises:
            ValueError: it is not a checkpoint of this library.
        """
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
        if "checkpoint" not in metadata:
            raise ValueError(f"{path} is not a checkpoint of a training run.")
        return cls(path=path, **json.loads(metadata["checkpoint"]))

    def load_model(self, model: torch.nn.Module) -> None:
        """Put the checkpoint's weights into a model of the same architecture."""
        with safe_open(str(self.path), framework="pt") as file, torch.no_grad():
            for name, value in _state(model).items():
                value.copy_(file.get_tensor(f"model.{name}"))

    def load_optimizer(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        """Put the checkpoint's moments into an optimizer of such a model."""
        with safe_open(str(self.path), framework="pt") as file:
            for name, parameter in model.named_parameters():
                optimizer.state[parameter] = {
                    moment: file.get_tensor(f"optimizer.{moment}.{name}")
                    for moment in ("step", "exp_avg", "exp_avg_sq")
                }


def checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a folder, in the order of their epochs."""
    return [Checkpoint.read(path) for path in sorted(folder.glob(_PATTERN))]


def train(
    model: torch.nn.Module,
    tokens: Tensor,
    labels: Tensor,
    recipe: Recipe,
    *,
    held_out: tuple[Tensor, Tensor] | None = None,
    folder: Path | None = None,
    save_at: Iterable[int] = (),
    branch_from: Checkpoint | None = None,
    progress: bool = False,
) -> None:
    """Train a model in place; with a folder, in checkpoints that a later call goes on from.

    Arguments:
        model: freshly built; takes tokens `[batch, pos]` to logits.
        tokens: `[n, pos]`.
        labels: `[n, pos]`, the right token after each position; `IGNORED` where there is none.
        recipe: how to train.
        held_out: tokens and labels to measure accuracy on.
        folder: where checkpoints are kept.
        save_at: epochs to keep a checkpoint of, besides the last.
        branch_from: a checkpoint of another run to start from, in place of a new model, in a folder of its own. Its
            recipe may be another one.
        progress: show a progress bar with the loss and both accuracies.

    Raises:
        ValueError: the folder holds a run by another recipe.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    start = 0
    found = checkpoints(folder) if folder is not None and folder.exists() else []
    if found and (differ := _differences(found[-1].recipe, recipe)):
        raise ValueError(
            f"{folder} holds a run by another recipe ({differ}). Go on with that recipe, choose another folder, or "
            "branch from one of its checkpoints."
        )
    if source := found[-1] if found else branch_from:
        source.load_model(model)
        source.load_optimizer(optimizer, model)
        start = source.epoch
    save_at = {*save_at, recipe.epochs}
    bar = tqdm(total=recipe.epochs, desc="Training", initial=start, disable=not progress, unit="epoch")
    for epoch in range(start, recipe.epochs):
        loss = _train_epoch(model, optimizer, tokens, labels, recipe, epoch)
        bar.update()
        done = epoch + 1
        kept = folder is not None and done in save_at
        if kept or (progress and (done % SHOW_EVERY == 0 or done == recipe.epochs)):
            metrics = {"loss": loss, "train_accuracy": accuracy(model, tokens, labels)}
            if held_out is not None:
                metrics["test_accuracy"] = accuracy(model, *held_out)
            bar.set_postfix({name: f"{value:.3f}" for name, value in metrics.items()})
            if folder is not None and kept:
                _save(folder, model, optimizer, done, recipe, metrics)
    bar.close()
    model.eval()


def _train_epoch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    labels: Tensor,
    recipe: Recipe,
    epoch: int,
) -> float:
    model.train()
    loss = torch.zeros(())
    order = torch.Generator().manual_seed(recipe.seed * 1_000_003 + epoch)
    # Dropout draws from torch's global state, which is the caller's: it is put back after the epoch.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed * 1_000_003 + epoch)
        for batch in torch.randperm(len(tokens), generator=order).split(recipe.batch_size):
            logits = model(tokens[batch])
            loss = cross_entropy(logits.flatten(0, 1), labels[batch].flatten(), ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(model: torch.nn.Module, tokens: Tensor, labels: Tensor) -> float:
    """The share of labelled positions that a model gets right, in evaluation mode."""
    model.eval()
    counted = labels != IGNORED
    return float((model(tokens).argmax(-1) == labels)[counted].double().mean())


def _differences(there: dict[str, Any], recipe: Recipe) -> str:
    """In what a recipe differs from that of an earlier run; more epochs are not a difference."""
    return ", ".join(
        f"{name} {there[name]} there, {value} here"
        for name, value in asdict(recipe).items()
        if name != "epochs" and there[name] != value
    )


def _state(model: torch.nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _save(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    recipe: Recipe,
    metrics: dict[str, float],
) -> None:
    """Write a checkpoint so that it is there whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value for name, value in _state(model).items()}
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{moment}.{name}"] = value
    tensors = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
    about = {"epoch": epoch, "recipe": asdict(recipe), "metrics": metrics}
    path = folder / _PATTERN.replace("*", f"{epoch:06d}")
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, str(unfinished), {"checkpoint": json.dumps(about)})
    os.replace(unfinished, path)
