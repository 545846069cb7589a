"""Grokking: a cyclic core condenses in a transformer that learns to add modulo p, and may inflate afterwards.

The model reads [a, b] and answers a + b mod p. Trained on half of all pairs, it first learns them by heart and much
later, rather suddenly, finds the rule. Then its core is a few clocks: planes in which one step of the answer is a
rotation by a multiple of 2 pi / p. Under continued weight decay, a model whose residual stream is normalised fills up
with further clocks, each of which carries the answer again.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

import ace_lens as ace
from ace_lens.experiments.postnorm import build_postnorm
from ace_lens.experiments.toys import build_native
from ace_lens.experiments.training import IGNORED, Checkpoint, Recipe, checkpoints, train
from ace_lens.reports import Report
from ace_lens.shapes import typed
from ace_lens.trajectory import SUFFICIENT_WITHIN, trajectory_table

N_LAYERS = 2
D_MODEL = 128
N_HEADS = 4
D_MLP = 512
DROPOUT = 0.1
LEARNING_RATE = 1e-3
BATCH_SIZE = 512
HOOK_POINT = f"blocks.{N_LAYERS - 1}.hook_resid_post"
TARGET = ace.CentredLogits()
ENERGY = 0.99
GROKKED = 0.99
"""The held-out accuracy from which on a model counts as having grokked."""


@dataclass(frozen=True)
class Preset:
    """How long a run takes, and where it is looked at.

    Arguments:
        epochs: passes over the training pairs, by normalisation.
        branch_at: the epoch at which weight decay is taken off in the branch, by normalisation.
        every: epochs between checkpoints, up to 2000.
        later: epochs between checkpoints after that.
    """

    epochs: dict[str, int]
    branch_at: dict[str, int]
    every: int
    later: int = 500

    def stops(self, epochs: int) -> list[int]:
        """The epochs at which a checkpoint is kept."""
        early = range(self.every, min(epochs, 2000) + 1, self.every)
        late = range(2000 + self.later, epochs + 1, self.later)
        return sorted({*early, *late, epochs})


PRESETS = {
    "quick": Preset(
        epochs={"none": 800, "pre": 800, "post": 1000}, branch_at={"none": 500, "pre": 500, "post": 600}, every=50
    ),
    "paper": Preset(
        epochs={"none": 4000, "pre": 4000, "post": 20000}, branch_at={"none": 900, "pre": 900, "post": 900}, every=100
    ),
}
"""The quick preset stops soon after grokking; the paper's goes on, with checkpoints as the paper has them."""


@dataclass(frozen=True)
class ModularAdditionConfig:
    """Watch a cyclic core condense in a transformer that learns to add modulo p, and inflate afterwards."""

    preset: Literal["quick", "paper"] = "quick"
    """quick stops soon after grokking, paper goes on for thousands of epochs."""
    out: Path = Path("ace-lens-modular-addition")
    """Folder for results.json, the figure and the checkpoints; a run that was interrupted goes on from there."""
    normalization: Literal["none", "pre", "post"] = "none"
    """Blocks without normalisation, with LayerNorm before each part, or the paper's own: LayerNorm after each part, and
    dropout."""
    period: int = 53
    """p, the number of residues."""
    train_fraction: float = 0.5
    """The share of pairs that the model is trained on."""
    weight_decay: float = 1.0
    """Of AdamW."""
    seed: int = 0
    """Draws the split, the weights, the order of batches and dropout."""
    epochs: int | None = None
    """Passes over the training pairs; by default as the preset has it."""
    branch_at: int | None = None
    """The epoch at which the branch without weight decay leaves, a multiple of the epochs between checkpoints; by
    default as the preset has it. 0 for no branch."""
    progress: bool = True
    """Show progress bars."""

    def resolved(self) -> "ModularAdditionConfig":
        """The same, with the preset's figures in place of what is not given.

        Raises:
            ValueError: a branch at an epoch without a checkpoint.
        """
        preset = PRESETS[self.preset]
        epochs = self.epochs or preset.epochs[self.normalization]
        usual = preset.branch_at[self.normalization]
        branch_at = (usual if usual < epochs else 0) if self.branch_at is None else self.branch_at
        if branch_at and (branch_at not in preset.stops(epochs) or branch_at >= epochs):
            raise ValueError(
                f"A branch leaves from a checkpoint before the end, and there is none at epoch {branch_at}: the "
                f"{self.preset} preset keeps one every {preset.every} epochs, and ends at {epochs}. Choose such an "
                "epoch, or 0 for no branch."
            )
        return replace(self, epochs=epochs, branch_at=branch_at)


@dataclass(frozen=True)
class ModularAdditionResults(Report):
    """The experiment's results, as they stand in results.json.

    Arguments:
        config: what was run.
        grok_epoch: the first checkpoint with a held-out accuracy of 0.99; None if there is none.
        trajectory: the core at every checkpoint.
        branch: the same in the run that went on without weight decay; empty without a branch.
    """

    config: dict[str, Any]
    grok_epoch: int | None
    trajectory: list[ace.TrajectoryPoint]
    branch: list[ace.TrajectoryPoint] = field(default_factory=list)

    @property
    def period(self) -> int:
        """p, the number of residues."""
        return self.config["period"]

    def __str__(self) -> str:
        config = self.config
        grok = "not within this run" if self.grok_epoch is None else f"at epoch {self.grok_epoch}"
        chance, width = 2 / self.period, math.sin(math.pi / self.period)
        lines = [
            f"Addition modulo {self.period}, normalisation {config['normalization']}, weight decay "
            f"{config['weight_decay']:g}, seed {config['seed']} ({config['preset']} preset).",
            f"Held-out accuracy {GROKKED} {grok}. Core at {HOOK_POINT}, 95% intervals.",
            "",
            trajectory_table(self.trajectory),
        ]
        if self.branch:
            lines += ["", f"Without weight decay from epoch {config['branch_at']} on:", trajectory_table(self.branch)]
        lines += [
            "",
            f"rank: dimensions with {ENERGY:.0%} of the energy; keep and remove are at that rank, on held-out pairs.",
            f"r_suf: dimensions that keep the accuracy (less {SUFFICIENT_WITHIN}); r_nec: whose loss takes it to 2/p = "
            f"{chance:.3f}.",
            f"circle: share of eigenvalues within sin(pi/p) = {width:.3f} of the unit circle.",
            "R2: of the step from each answer to the next, predicted from all other steps.",
        ]
        return "\n".join(lines)


@typed
def addition_pairs(period: int) -> tuple[Int[Tensor, "pair 2"], Int[Tensor, "pair"]]:
    """All pairs [a, b] of residues, and a + b modulo `period`.

    Raises:
        ValueError: a period below 3, in which there is no cycle to find.
    """
    if period < 3:
        raise ValueError(f"Addition modulo {period} has no cycle to find. Choose a period of at least 3.")
    residues = torch.arange(period)
    pairs = torch.cartesian_prod(residues, residues)
    return pairs, pairs.sum(1) % period


@typed
def split_pairs(
    period: int, train_fraction: float, generator: torch.Generator
) -> tuple[Int[Tensor, "train"], Int[Tensor, "held_out"]]:
    """Indices of the pairs to train on, a share drawn at random, and of those held out.

    Raises:
        ValueError: one of the two parts would be empty.
    """
    n_pairs = period * period
    n_train = int(train_fraction * n_pairs)
    if not 0 < n_train < n_pairs:
        raise ValueError(
            f"A training share of {train_fraction:g} of {n_pairs} pairs leaves no pair to "
            f"{'train on' if n_train <= 0 else 'hold out'}. Choose a share between 0 and 1."
        )
    order = torch.randperm(n_pairs, generator=generator)
    return order[:n_train], order[n_train:]


def build_model(period: int, normalization: Literal["none", "pre", "post"], seed: int) -> Any:
    """A two-layer transformer with freshly drawn weights that reads two residues."""
    sizes = {"n_layers": N_LAYERS, "d_model": D_MODEL, "n_heads": N_HEADS, "d_mlp": D_MLP, "n_ctx": 2}
    if normalization == "post":
        return build_postnorm(**sizes, d_vocab=period, dropout=DROPOUT, seed=seed)
    return build_native(**sizes, d_vocab=period, normalization=normalization, seed=seed)


def run_modular_addition(config: ModularAdditionConfig) -> ModularAdditionResults:
    """Train a model, and a branch of it without weight decay; follow the core in both.

    Checkpoints lie under `config.out`, and training goes on from the last one there.

    Raises:
        ValueError: a task that cannot be, or a folder that holds a run of another configuration.
    """
    config = config.resolved()
    epochs, branches_at = config.epochs or 0, config.branch_at or 0
    pairs, sums = addition_pairs(config.period)
    trained, held_out = split_pairs(config.period, config.train_fraction, torch.Generator().manual_seed(config.seed))
    _claim(config)
    stops = PRESETS[config.preset].stops(epochs)
    decayed = Recipe(epochs, LEARNING_RATE, config.weight_decay, BATCH_SIZE, config.seed)
    runs = {"checkpoints": (decayed, 0)}
    if branches_at:
        runs["branch"] = (replace(decayed, weight_decay=0.0), branches_at)

    # Only the last position answers.
    labels = torch.stack([torch.full_like(sums, IGNORED), sums], 1)
    trajectories = {}
    for name, (recipe, branch_at) in runs.items():
        model = build_model(config.period, config.normalization, config.seed)
        train(
            model,
            pairs[trained],
            labels[trained],
            recipe,
            held_out=(pairs[held_out], labels[held_out]),
            folder=config.out / name,
            save_at=stops,
            branch_from=_checkpoint_at(config.out / "checkpoints", branch_at) if branch_at else None,
            progress=config.progress,
        )
        seen, unseen = (
            ace.Samples.from_tokens(pairs[index], "last", labels=sums[index]) for index in (trained, held_out)
        )
        models = _models(config, name, set(stops))
        trajectories[name] = ace.track_core(
            models,
            seen,
            unseen,
            TARGET,
            HOOK_POINT,
            period=config.period,
            energy=ENERGY,
            chance=2 / config.period,
            progress=config.progress,
        )
    points = trajectories["checkpoints"].points
    about = {name: value for name, value in asdict(config).items() if name not in ("out", "progress")}
    return ModularAdditionResults(
        config=about,
        grok_epoch=next((point.epoch for point in points if point.test_accuracy >= GROKKED), None),
        trajectory=list(points),
        branch=list(trajectories["branch"].points) if "branch" in trajectories else [],
    )


def _models(config: ModularAdditionConfig, name: str, stops: set[int]) -> Iterator[tuple[int, Any]]:
    """The models of a run at its checkpoints; a folder may hold more of them, from a longer run."""

    def build() -> Any:
        return build_model(config.period, config.normalization, config.seed)

    return ((epoch, model) for epoch, model in ace.models_in(config.out / name, build) if epoch in stops)


def _checkpoint_at(folder: Path, epoch: int) -> Checkpoint:
    return next(checkpoint for checkpoint in checkpoints(folder) if checkpoint.epoch == epoch)


def _claim(config: ModularAdditionConfig) -> None:
    """Write down what the folder is for, or see that it is for the same.

    Raises:
        ValueError: it is for another configuration.
    """
    fixed = {name: getattr(config, name) for name in ("normalization", "period", "train_fraction", "weight_decay")}
    fixed |= {name: getattr(config, name) for name in ("seed", "branch_at")}
    path = config.out / "config.json"
    if not path.exists():
        config.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fixed, indent=1) + "\n")
        return
    there = json.loads(path.read_text())
    differ = ", ".join(
        f"{name} {there[name]} there, {value} here" for name, value in fixed.items() if there[name] != value
    )
    if differ:
        raise ValueError(
            f"{config.out} holds a run of another configuration ({differ}). Choose another folder (--out), or the "
            "options of that run to go on with it."
        )
