"""A core through training: what it is at every checkpoint, and how much of it is needed.

At a checkpoint the core is extracted over all inputs given, those that the model was trained on and those held out,
and its interventions are scored on the held-out ones. Neither the core nor its energy rank looks at a label, so nothing
that is scored was chosen on the score. For a cyclic task, the step from each class to the next is fitted inside it.
"""

import cmath
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm

from ace_lens.core import Core
from ace_lens.downstream import edited_outputs, paused_passes
from ace_lens.extraction import CoreExtractor
from ace_lens.identification import fit_cycle, fourier_power
from ace_lens.models import HookedModel, canonical_hook_point
from ace_lens.probe import JacobianProbe
from ace_lens.readout import Readout, find_readout
from ace_lens.reports import Report
from ace_lens.samples import Samples
from ace_lens.targets import Target, describe, task_outputs
from ace_lens.validation import Resampler, rank_sweep

SUFFICIENT_WITHIN = 0.005
"""How far below the model's own accuracy a sufficient core may stay."""


@dataclass(frozen=True)
class TrajectoryPoint:
    """A core at one checkpoint. Accuracies are on held-out samples where not said otherwise.

    Arguments:
        epoch: when it was.
        train_accuracy: the model's accuracy on the samples that it was trained on.
        test_accuracy: its accuracy on held-out samples.
        test_accuracy_interval: 95% bootstrap interval over sequences.
        rank: the dimensions that hold the given share of energy.
        r_suf: the smallest rank that keeps the model's accuracy, less 0.005; None if none does.
        r_nec: the smallest rank whose removal takes the accuracy to the level of chance; None if none does. Both are
            None while the model itself is no better than that.
        keep: accuracy with nothing but the core of `rank` dimensions.
        keep_interval: its interval.
        remove: accuracy without the core of `rank` dimensions.
        remove_interval: its interval.
        keep_curve: accuracy with nothing but the core of rank 1, 2, ...
        remove_curve: accuracy without the core of rank 1, 2, ...
        eigenvalues: of the step from class to class, in the core of `rank` dimensions, as [real, imaginary]; this and
            what follows is empty or None for tasks that are not cyclic.
        unit_circle: the share of eigenvalues within sin(pi / period) of the unit circle.
        modes: the frequencies of the eigenvalues (see `LinearOperator.modes`).
        r2: R^2 of the step, each class left out in turn; None where the dimensions are enough for any order of classes.
        fourier_power: the share of each frequency in the token embedding, from 0 on; empty without `model.embed`.
    """

    epoch: int
    train_accuracy: float
    test_accuracy: float
    test_accuracy_interval: tuple[float, float]
    rank: int
    r_suf: int | None
    r_nec: int | None
    keep: float
    keep_interval: tuple[float, float]
    remove: float
    remove_interval: tuple[float, float]
    keep_curve: tuple[float, ...]
    remove_curve: tuple[float, ...]
    eigenvalues: tuple[tuple[float, float], ...] = ()
    unit_circle: float | None = None
    modes: tuple[int, ...] = ()
    r2: float | None = None
    fourier_power: tuple[float, ...] = ()

    @property
    def redundancy(self) -> int | None:
        """r_nec - r_suf: dimensions that carry the task again, beyond those that are enough for it."""
        return None if self.r_nec is None or self.r_suf is None else self.r_nec - self.r_suf


@dataclass(frozen=True)
class Trajectory(Report):
    """Cores along a training run; `str()` gives a table."""

    points: tuple[TrajectoryPoint, ...]

    def __str__(self) -> str:
        return trajectory_table(self.points)


def trajectory_table(points: Iterable[TrajectoryPoint]) -> str:
    """A line a checkpoint; circle, modes and R2 are those of the step from class to class."""
    cyclic = any(point.eigenvalues for point in points)
    lines = [
        f"{'epoch':>6}  {'train':>5}  {'test':>5}  {'rank':>4}  {'r_suf':>5}  {'r_nec':>5}  "
        f"{'keep':<20}  {'remove':<20}" + (f"  {'circle':>6}  {'modes':>5}  {'R2':>6}" if cyclic else "")
    ]
    for point in points:
        cells = [
            f"{point.epoch:>6}",
            f"{point.train_accuracy:>5.3f}",
            f"{point.test_accuracy:>5.3f}",
            f"{point.rank:>4}",
            *(f"{'-' if rank is None else rank:>5}" for rank in (point.r_suf, point.r_nec)),
            *(
                f"{f'{value:.3f} [{low:.3f}, {high:.3f}]':<20}"
                for value, (low, high) in (
                    (point.keep, point.keep_interval),
                    (point.remove, point.remove_interval),
                )
            ),
        ]
        if cyclic:
            r2 = "-" if point.r2 is None else f"{point.r2:.3f}"
            cells += [f"{point.unit_circle:>6.2f}", f"{len(point.modes):>5}", f"{r2:>6}"]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def models_in(folder: str | Path, build: Callable[[], Any]) -> Iterator[tuple[int, Any]]:
    """The models whose weights lie in a folder, one after another, each with the number that its file is called by.

    Arguments:
        folder: files `*.safetensors`, `*.pt` or `*.pth`, each a state dict, with a number in the name, such as
            `epoch-000100.safetensors` or `step_2000.pt`; the last number counts, and gives the order. The weights may
            be one entry (`model`, `state_dict` or `model_state_dict`) among others, or keys that begin with `model.`.
        build: makes a model of the architecture; it is put in evaluation mode.

    Raises:
        ValueError: no such file, a name without a number, or weights that do not fit the model.
    """
    paths = [path for path in Path(folder).glob("*") if path.suffix in (".safetensors", ".pt", ".pth")]
    if not paths:
        raise ValueError(f"{folder} holds no checkpoints: no file *.safetensors, *.pt or *.pth.")
    numbered = []
    for path in paths:
        numbers = re.findall(r"\d+", path.stem)
        if not numbers:
            raise ValueError(f"{path} has no number in its name, so its place in the training is unknown.")
        numbered.append((int(numbers[-1]), path))
    for number, path in sorted(numbered):
        model = build().eval()
        _load_weights(model, path)
        yield number, model


def _load_weights(model: Any, path: Path) -> None:
    if path.suffix == ".safetensors":
        state: dict[str, Any] = load_file(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    for entry in ("model", "state_dict", "model_state_dict"):
        state = state[entry] if isinstance(state.get(entry), dict) else state
    own = {name: value for name, value in (*model.named_parameters(), *model.named_buffers())}
    if not own.keys() & state.keys():
        state = {name.removeprefix("model."): value for name, value in state.items()}
    missing = sorted(own.keys() - state.keys())
    other = sorted(name for name in own.keys() & state.keys() if own[name].shape != state[name].shape)
    # Buffers such as masks are often left out of a state dict, and are what the model was built with.
    missing = [name for name in missing if name in dict(model.named_parameters())]
    if missing or other:
        raise ValueError(
            f"{path} does not fit the model: {len(missing)} parameters are missing{_first(missing)}, {len(other)} have "
            f"another shape{_first(other)}. Build the model with the configuration that it was trained with."
        )
    with torch.no_grad():
        for name in own.keys() & state.keys():
            own[name].copy_(state[name])


def _first(names: list[str]) -> str:
    return f" (such as {names[0]})" if names else ""


def track_core(
    models: Iterable[tuple[int, HookedModel]],
    train: Samples,
    held_out: Samples,
    target: Target,
    hook_point: str,
    *,
    period: int | None = None,
    energy: float = 0.99,
    chance: float | None = None,
    n_bootstrap: int = 200,
    batch_size: int = 1536,
    progress: bool = False,
) -> Trajectory:
    """Follow a core through training.

    Arguments:
        models: pairs of an epoch (or step) and the model as it was then, such as `models_in(folder, build)`.
        train: labelled samples that the models were trained on.
        held_out: labelled samples that they were not trained on.
        target: the task output, one logit for each class, such as `CentredLogits()`.
        hook_point: where the core lives.
        period: for cyclic tasks, the number p of classes: label c is followed by c + 1 mod p, and token c of the
            embedding stands for c.
        energy: the share of the squared singular values that the core of `rank` dimensions holds.
        chance: the accuracy at or below which a task counts as lost; by default twice that of always giving the
            commonest label.
        n_bootstrap: how often sequences are resampled for the intervals.
        batch_size: rows in a forward pass. More are no faster with a small model, which then takes new memory from the
            system at every step.
        progress: show a progress bar.

    Raises:
        ValueError: samples without labels, a target of one output, labels that are not the numbers of outputs, or what
            `extract_core` and `fit_cycle` raise.
    """
    if train.labels is None or held_out.labels is None:
        raise ValueError("A trajectory compares outputs with labels, but the samples have none.")
    if chance is None:
        chance = min(1.0, 2 * float(held_out.labels.unique(return_counts=True)[1].max()) / len(held_out))
    resampler = Resampler(held_out, n_bootstrap, None)
    samples = _joined(train, held_out)
    tracker = _Tracker(train, held_out, samples, target, hook_point, period, energy, chance, resampler, batch_size)
    return Trajectory(
        tuple(
            tracker.point(epoch, model)
            for epoch, model in tqdm(models, "Analysing checkpoints", leave=False, disable=not progress)
        )
    )


@dataclass(frozen=True)
class _Tracker:
    """Analyses one checkpoint after another; fields as the arguments of `track_core`, and the samples of both kinds."""

    train: Samples
    held_out: Samples
    samples: Samples
    target: Target
    hook_point: str
    period: int | None
    energy: float
    chance: float
    resampler: Resampler
    batch_size: int

    def point(self, epoch: int, model: HookedModel) -> TrajectoryPoint:
        seen = self._observe(model)
        rank = int((seen.core.energy < self.energy - 1e-12).sum()) + 1
        right = self._right_by_rank(model, seen)
        curves = {name: by_rank.double().mean(1).tolist() for name, by_rank in right.items()}
        baseline = self.resampler.mean(_right(seen.outputs[len(self.train) :], self.held_out))
        keep, remove = (self.resampler.mean(right[name][rank - 1]) for name in ("keep", "remove"))
        explains = baseline.low > self.chance
        enough = [kept >= baseline.value - SUFFICIENT_WITHIN for kept in curves["keep"]]
        gone = [left <= self.chance for left in curves["remove"]]
        return TrajectoryPoint(
            epoch=epoch,
            train_accuracy=float(_right(seen.outputs[: len(self.train)], self.train).double().mean()),
            test_accuracy=baseline.value,
            test_accuracy_interval=(baseline.low, baseline.high),
            rank=rank,
            r_suf=enough.index(True) + 1 if explains and any(enough) else None,
            r_nec=gone.index(True) + 1 if explains and any(gone) else None,
            keep=keep.value,
            keep_interval=(keep.low, keep.high),
            remove=remove.value,
            remove_interval=(remove.low, remove.high),
            keep_curve=tuple(curves["keep"]),
            remove_curve=tuple(curves["remove"]),
            **({} if self.period is None else self._cycle(model, seen.core[:rank], seen, self.period)),
        )

    def _observe(self, model: HookedModel) -> "_Observed":
        """Activations and outputs of all samples, and the core over them."""
        passes = list(paused_passes(model, self.samples, self.hook_point, batch_size=self.batch_size))
        order = torch.cat([paused.index for paused in passes]).argsort()
        # Four computations in float64 follow.
        activations = torch.cat([paused.activations for paused in passes]).double()[order]
        outputs = torch.cat([task_outputs(self.target, paused.logits) for paused in passes])[order]
        self._require_labels(outputs.shape[1])
        extractor = CoreExtractor(canonical_hook_point(self.hook_point))
        readout = find_readout(model, passes, self.target)
        if readout is None:
            probe = JacobianProbe(model, self.target, self.hook_point, batch_size=self.batch_size)
            (probed,) = probe(self.samples).values()
            extractor.update(probed.activations, probed.jacobians)
        else:
            extractor.update_factored(activations, *readout.jacobian_factor(activations))
        return _Observed(activations, outputs, extractor.core(), readout)

    def _require_labels(self, n_outputs: int) -> None:
        labels = self.samples.labels
        assert labels is not None
        if n_outputs < 2 or labels.min() < 0 or labels.max() >= n_outputs:
            raise ValueError(
                f"A trajectory asks which of several outputs is the largest. {describe(self.target)} has {n_outputs}, "
                "and labels are the numbers of outputs, counted from 0; these go from "
                f"{int(labels.min())} to {int(labels.max())}. Give a target with one logit for each class, such as "
                "CentredLogits(), and labels that count its tokens."
            )

    def _right_by_rank(self, model: HookedModel, seen: "_Observed") -> dict[str, Tensor]:
        """Which held-out samples are answered right under "keep" and "remove", `[rank, sample]` each."""
        if seen.readout is not None:
            activations, labels = seen.activations[len(self.train) :], self.held_out.labels
            return seen.readout.right_by_rank(seen.core, activations, labels)  # type: ignore[arg-type]
        ranks, names = range(1, seen.core.rank + 1), ("keep", "remove")
        edits, hook_point = rank_sweep(seen.core, ranks, names), seen.core.hook_point
        result = edited_outputs(model, self.held_out, self.target, hook_point, edits, batch_size=self.batch_size)
        return {
            name: torch.stack([_right(result.edited[f"{name} {rank}"], self.held_out) for rank in ranks])
            for name in names
        }

    def _cycle(self, model: HookedModel, core: Core, seen: "_Observed", period: int) -> dict[str, Any]:
        """The fields of `TrajectoryPoint` on the step from class to class."""
        labels = self.samples.labels
        assert labels is not None
        operator = fit_cycle(core.coordinates(seen.activations), labels, period)
        embed: Any = getattr(model, "embed", None)
        power: tuple[float, ...] = ()
        if isinstance(embed, torch.nn.Module):
            with torch.no_grad():
                shares = fourier_power(embed(torch.arange(period)[:, None])[:, 0])
                power = tuple(_rounded(share) for share in shares.tolist())
        # By modulus as it is reported, then by angle: several lie on the circle, in an order that is rounding.
        values = sorted(operator.eigenvalues.tolist(), key=lambda value: (-_rounded(abs(value)), cmath.phase(value)))
        return {
            "eigenvalues": tuple((_rounded(value.real), _rounded(value.imag)) for value in values),
            "unit_circle": operator.unit_circle_share(period),
            "modes": tuple(operator.modes(period)),
            "r2": None if math.isnan(operator.r2) else _rounded(operator.r2),
            "fourier_power": power,
        }


@dataclass(frozen=True)
class _Observed:
    """What a model does with the samples, those that it was trained on before those held out.

    Arguments:
        activations: `[n, d_model]`.
        outputs: `[n, target]`.
        core: over all of them, at its full rank.
        readout: what follows the hook point, where that is a final norm or none, and one affine map.
    """

    activations: Tensor
    outputs: Tensor
    core: Core
    readout: Readout | None


def _joined(first: Samples, second: Samples) -> Samples:
    """The labelled samples of both, those of the first before those of the second."""
    width = max(part.tokens.shape[1] for part in (first, second))

    def stacked(name: str) -> Tensor:
        return torch.cat([pad(x, (0, width - x.shape[1])) for x in (getattr(first, name), getattr(second, name))])

    return Samples(
        stacked("tokens"),
        stacked("attention_mask"),
        torch.cat([first.sequence, second.sequence + len(first.tokens)]),
        torch.cat([first.position, second.position]),
        torch.cat([first.labels, second.labels]),  # type: ignore[list-item]
    )


def _rounded(value: float) -> float:
    """To nine decimals: the last bits of linear algebra depend on where in memory its operands lie."""
    return round(value, 9) + 0.0


def _right(outputs: Tensor, samples: Samples) -> Tensor:
    """Whether each sample's largest output is its label's, `[sample]`."""
    return outputs.argmax(1).cpu() == samples.labels
