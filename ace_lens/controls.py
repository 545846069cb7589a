"""What a core has to beat: subspaces of the same rank that are found in other ways, put to the same test.

A scalar output near the end of a model can be kept, removed and flipped by almost any sensible axis. A core's own
numbers therefore say little until they stand beside random subspaces, the usual ways of finding directions, and a
subspace trained for the very purpose.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from sklearn.covariance import ledoit_wolf
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits
from torch import Tensor

from ace_lens.core import Core
from ace_lens.downstream import Edits, edited_outputs, paused_passes
from ace_lens.models import HookedModel, HookFunction
from ace_lens.probe import JacobianProbe
from ace_lens.reports import Report
from ace_lens.samples import Samples
from ace_lens.scores import Score
from ace_lens.shapes import Activations, Basis, Jacobians, typed
from ace_lens.targets import Target, describe, task_outputs
from ace_lens.validation import INTERVENTIONS, Bootstrap, Estimate, intervention, text_perplexity


@dataclass(frozen=True)
class Projection:
    """h -> mu + W R^T (h - mu), a projection that need not be orthogonal.

    Arguments:
        reads: `[d_model, rank]`, R: what is read of the residual stream.
        writes: `[d_model, rank]`, W: where it is written; R^T W is the identity.
    """

    reads: Tensor
    writes: Tensor

    @classmethod
    def onto(cls, basis: Tensor) -> "Projection":
        """The orthogonal projection onto the span of orthonormal columns."""
        return cls(basis, basis)

    @property
    def rank(self) -> int:
        """Dimensions of the subspace."""
        return self.reads.shape[1]


@typed
def random_subspace(d_model: int, rank: int, generator: torch.Generator) -> Basis:
    """A subspace drawn evenly from all of that rank, `[d_model, rank]`."""
    return torch.linalg.qr(torch.randn(d_model, rank, generator=generator, dtype=torch.float64)).Q


@typed
def random_active_subspace(activations: Activations, rank: int, generator: torch.Generator) -> Basis:
    """A subspace spanned by draws from a Gaussian with the activations' own covariance, `[d_model, rank]`."""
    deviation = activations.double() - activations.double().mean(0)
    draws = torch.randn(len(deviation), rank, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(deviation.T @ draws).Q


@typed
def principal_components(activations: Activations, rank: int) -> Basis:
    """The directions in which the activations vary most: the right singular vectors of H, `[d_model, rank]`."""
    deviation = activations.double() - activations.double().mean(0)
    return torch.linalg.svd(deviation, full_matrices=False).Vh[:rank].T.contiguous()


@typed
def leading_gradients(jacobians: Jacobians, rank: int) -> Basis:
    """The directions that the outputs are most sensitive to: the right singular vectors of J, `[d_model, rank]`."""
    rows = torch.linalg.qr(jacobians.double().flatten(0, 1), mode="r").R
    return torch.linalg.svd(rows, full_matrices=False).Vh[:rank].T.contiguous()


@typed
def class_mean_differences(activations: Activations, labels: Shaped[Tensor, "sample"], rank: int) -> Basis:
    """The directions in which class means differ most, `[d_model, rank]`; at most one fewer than classes."""
    means = torch.stack([activations.double()[labels == label].mean(0) for label in labels.unique()])
    rank = min(rank, len(means) - 1)
    return torch.linalg.svd(means - means.mean(0), full_matrices=False).Vh[:rank].T.contiguous()


@typed
def linear_probe(activations: Activations, labels: Shaped[Tensor, "sample"], rank: int) -> Basis:
    """The directions that a logistic regression reads the labels from, `[d_model, rank]`.

    Activations are standardised first; of several classes, the leading singular directions of the weights.
    """
    scaler = StandardScaler()
    scaled = scaler.fit_transform(activations.double().numpy())
    # More threads than one wait for each other here, the longer the busier the machine.
    with threadpool_limits(1):
        probe = LogisticRegression(max_iter=2000).fit(scaled, labels.numpy())
    weights = torch.as_tensor(probe.coef_ / scaler.scale_)
    rank = min(rank, len(weights) if len(weights) == 1 else len(weights) - 1)
    return (
        torch.linalg.svd(weights - weights.mean(0) * (len(weights) > 1), full_matrices=False).Vh[:rank].T.contiguous()
    )


@typed
def leace(activations: Activations, labels: Shaped[Tensor, "sample"], *, shrinkage: bool = True) -> Projection:
    """The oblique projection whose removal leaves no linear trace of the labels and changes activations least.

    LEACE (Belrose et al. 2023, theorem 4.3): with W = Cov(h)^(-1/2) and P the orthogonal projection onto the column
    space of W Cov(h, z), z the one-hot label, it removes W^+ P W (h - mu). Its rank is that of Cov(h, z), one fewer
    than classes; a lower one would leave a trace.

    Arguments:
        activations: `[sample, d_model]`.
        labels: `[sample]`, classes.
        shrinkage: estimate Cov(h) with Ledoit and Wolf's shrinkage, without which few samples in many dimensions make a
            poor W. What is erased is erased either way.
    """
    deviation = activations.double() - activations.double().mean(0)
    one_hot = (labels[:, None] == labels.unique()).double()
    cross = deviation.T @ (one_hot - one_hot.mean(0)) / len(deviation)
    if shrinkage:
        covariance = torch.as_tensor(ledoit_wolf(deviation.numpy(), assume_centered=True)[0])
    else:
        covariance = deviation.T @ deviation / len(deviation)
    values, vectors = torch.linalg.eigh(covariance)
    support = values > values.max() * len(values) * torch.finfo(torch.float64).eps
    values, vectors = values[support], vectors[:, support]
    whitened = (vectors / values.sqrt()).T @ cross
    left, sizes, _ = torch.linalg.svd(whitened, full_matrices=False)
    left = left[:, sizes > sizes.max() * 1e-8]
    return Projection(reads=(vectors / values.sqrt()) @ left, writes=(vectors * values.sqrt()) @ left)


def trained_subspace(
    model: HookedModel,
    samples: Samples,
    target: Target,
    hook_point: str,
    rank: int,
    *,
    generator: torch.Generator,
    n_steps: int = 200,
    learning_rate: float = 0.02,
    batch_size: int = 64,
) -> Tensor:
    """A subspace trained so that swapping it between samples swaps their outputs, `[d_model, rank]`.

    Distributed alignment search (Geiger et al. 2024): the coordinates of one sample in the subspace are replaced by
    those of another, and gradient descent turns the subspace until the outputs become the other sample's. The loss is
    the cross-entropy to the other's outputs as logits where there are several, their squared difference where there is
    one.

    Arguments:
        model: the model; its parameters are not touched.
        samples: samples to train on.
        target: the task output.
        hook_point: where the subspace lies.
        rank: its rank.
        generator: draws the start and the pairs.
        n_steps: steps of Adam, a batch each.
        learning_rate: of Adam.
        batch_size: rows in a forward pass.
    """
    # Residuals kept from a caller's inference_mode could not enter a graph.
    with torch.inference_mode(False):
        paused = list(paused_passes(model, samples, hook_point, batch_size=batch_size))
    paused = [each for each in paused if len(each.index) > 1]
    if not paused:
        raise ValueError(
            "Swapping between samples needs two in a batch. Raise batch_size, or leave training out (n_steps=0)."
        )
    dtype = torch.promote_types(paused[0].activations.dtype, torch.float32)
    start = random_subspace(paused[0].activations.shape[-1], rank, generator)
    with torch.inference_mode(False), torch.enable_grad():
        raw = start.to(paused[0].activations.device, dtype).requires_grad_(True)
        optimizer = torch.optim.Adam([raw], lr=learning_rate)
        for step in range(n_steps):
            each = paused[step % len(paused)]
            other = torch.randperm(len(each.index), generator=generator)
            activations = each.activations.to(dtype)
            basis = torch.linalg.qr(raw).Q
            swapped = activations + (activations[other] - activations) @ basis @ basis.T
            outputs = task_outputs(target, each.resume(swapped.to(each.activations.dtype)))
            wanted = task_outputs(target, each.logits)[other]
            if outputs.shape[1] == 1:
                loss = (outputs - wanted).square().mean() / wanted.var().clamp_min(1e-12)
            else:
                loss = torch.nn.functional.cross_entropy(outputs, wanted.softmax(1))
            # Not backward(): the model's parameters keep the gradients that they had.
            (raw.grad,) = torch.autograd.grad(loss, [raw])
            optimizer.step()
        return torch.linalg.qr(raw.detach().double()).Q.cpu()


@dataclass(frozen=True)
class ControlRow:
    """One way of finding a subspace, under the three interventions.

    Arguments:
        name: the way.
        rank: the rank of the subspace: the core's, or lower where there is no more to be found; LEACE has the rank that
            it needs, one fewer than classes.
        keep: the score with nothing but the subspace; the interval is over samples, or over draws for random ones.
        remove: the score with the subspace removed.
        flip: the score with the subspace's sign flipped.
        outside_kl: for "keep", "remove" and "flip", the mean KL(unedited || edited) outside the target, in nats.
        perplexity: for each of them, at every position, the perplexity on ordinary text; empty if no text was given.
    """

    name: str
    rank: int
    keep: Estimate
    remove: Estimate
    flip: Estimate
    outside_kl: dict[str, float]
    perplexity: dict[str, float]


@dataclass(frozen=True)
class Controls(Report):
    """A core among controls, each fitted on the same samples and judged on the same others.

    Arguments:
        description: what was tested, in words.
        fitted_on: the samples that every subspace but the core was fitted on, in words.
        judged_on: the samples that all were judged on, in words.
        score: the score's name.
        baseline: the score without intervention.
        chance: the score of an answer that ignores the input; None where there is no such thing.
        rows: the core, then the controls.
        n_draws: how many random subspaces stand behind a row of them.
        perplexity: the perplexity on ordinary text without intervention; None if no text was given.
    """

    description: str
    fitted_on: str
    judged_on: str
    score: str
    baseline: Estimate
    chance: float | None
    rows: tuple[ControlRow, ...]
    n_draws: int
    perplexity: float | None = None

    def row(self, name: str) -> ControlRow:
        """The row of that name.

        Raises:
            KeyError: there is none.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"No control is called {name!r}. There are {', '.join(row.name for row in self.rows)}.")

    def __str__(self) -> str:
        chance = "" if self.chance is None else f", chance {self.chance:.3f}"
        side_effects = any(row.outside_kl for row in self.rows)
        kl = "  KL outside: keep, remove, flip" if side_effects else ""
        lines = [
            self.description,
            f"fitted on {self.fitted_on}; judged on {self.judged_on}",
            f"{self.score}: baseline {self.baseline}{chance} (95% intervals; of random subspaces over {self.n_draws} "
            "draws)",
            f"{'subspace':<22}  {'rank':>4}  {'keep':<22}  {'remove':<22}  {'flip':<22}{kl}",
        ]
        for row in self.rows:
            cells = "  ".join(f"{f'{getattr(row, name):.3f}':<22}" for name in INTERVENTIONS)
            kl = "  " + "  ".join(f"{row.outside_kl[name]:.4f}" for name in INTERVENTIONS) if row.outside_kl else ""
            lines.append(f"{row.name:<22}  {row.rank:>4}  {cells}{kl}".rstrip())
        if self.perplexity is not None:
            lines += [
                f"perplexity on text, {self.perplexity:.2f} without intervention",
                f"{'subspace':<22}  {'':>4}  {'keep':<22}  {'remove':<22}  flip",
            ]
            for row in self.rows:
                cells = "  ".join(f"{row.perplexity[name]:<22.2f}" for name in INTERVENTIONS)
                lines.append(f"{row.name:<22}  {'':>4}  {cells}".rstrip())
        return "\n".join(lines)


def compare_with_controls(
    model: HookedModel,
    core: Core,
    samples: Samples,
    target: Target,
    score: Score | None = None,
    *,
    fit: Samples,
    text: Samples | None = None,
    n_draws: int = 32,
    n_steps: int = 200,
    n_bootstrap: int = 200,
    generator: torch.Generator | None = None,
    batch_size: int = 64,
    progress: bool = False,
) -> Controls:
    """Put subspaces of the core's rank, found in other ways, to the core's own test.

    Random subspaces (drawn evenly, and from the activations' covariance), PCA of the activations, the leading
    gradients, a subspace trained for interchange (distributed alignment search), and for samples with class labels the
    differences of class means, a linear probe and LEACE.

    An orthogonal projection onto a random subspace passes on a faint but undistorted image of the core, so that where
    decisions depend on order alone (accuracy, ROC AUC), keeping it can score well above chance; cross-entropy and the
    removal of the subspace tell it apart.

    Arguments:
        model: the model.
        core: the core, of the rank to compare at.
        samples: the samples to judge on; neither the core nor a control has been fitted on them.
        target: the task output.
        score: as for `validate`.
        fit: the samples to fit the controls on.
        text: ordinary text (`Samples.from_text`), to take the perplexity on; of random subspaces, on one draw each.
        n_draws: random subspaces of each kind.
        n_steps: steps of training for distributed alignment search; 0 leaves it out.
        n_bootstrap: how often the sequences are resampled for the intervals.
        generator: draws the subspaces; seeded with 0 if not given.
        batch_size: rows in a forward pass.
        progress: show a progress bar.

    Raises:
        ValueError: the core does not fit the model, or labels are missing.
    """
    core.check_model(model)
    generator = generator or torch.Generator().manual_seed(0)
    rank = core.rank
    probed = JacobianProbe(model, target, core.hook_point, batch_size=batch_size)(fit)[core.hook_point]
    activations, jacobians = probed.activations.double().cpu(), probed.jacobians.cpu()
    found = {
        "core": Projection.onto(core.basis),
        "PCA of activations": Projection.onto(principal_components(activations, rank)),
        "leading gradients": Projection.onto(leading_gradients(jacobians, rank)),
    }
    if fit.labels is not None and bool((fit.labels == fit.labels.long()).all()):
        found["class mean differences"] = Projection.onto(class_mean_differences(activations, fit.labels, rank))
        found["linear probe"] = Projection.onto(linear_probe(activations, fit.labels, rank))
        found["LEACE"] = leace(activations, fit.labels)
    if n_steps:
        trained = trained_subspace(
            model, fit, target, core.hook_point, rank, generator=generator, n_steps=n_steps, batch_size=batch_size
        )
        found["trained (DAS)"] = Projection.onto(trained)
    draws: dict[str, Callable[[], Tensor]] = {
        "random": lambda: random_subspace(core.d_model, rank, generator),
        "random active": lambda: random_active_subspace(activations, rank, generator),
    }
    randoms = {f"{name} {draw}": Projection.onto(make()) for name, make in draws.items() for draw in range(n_draws)}
    result = edited_outputs(
        model,
        samples,
        target,
        core.hook_point,
        _edits(core, {**found, **randoms}),
        batch_size=batch_size,
        progress=progress,
    )
    estimate = Bootstrap(score, samples, result, n_bootstrap, generator)

    def perplexities(projection: Projection) -> dict[str, float]:
        if text is None:
            return {}
        hooks = _hooks(core, projection)
        return {kind: text_perplexity(model, text, [hook], batch_size=batch_size) for kind, hook in hooks.items()}

    def row(name: str, projection: Projection) -> ControlRow:
        scores = {kind: estimate(result.edited[f"{kind} {name}"]) for kind in INTERVENTIONS}
        kl = _mean_kl(result.outside_kl, [name])
        return ControlRow(name, projection.rank, **scores, outside_kl=kl, perplexity=perplexities(projection))

    def random_row(name: str) -> ControlRow:
        names = [f"{name} {draw}" for draw in range(n_draws)]
        scores = {
            kind: estimate.over_draws([result.edited[f"{kind} {each}"] for each in names]) for kind in INTERVENTIONS
        }
        kl = _mean_kl(result.outside_kl, names)
        return ControlRow(name, rank, **scores, outside_kl=kl, perplexity=perplexities(randoms[names[0]]))

    return Controls(
        description=f"Core at {core.hook_point} of {core.provenance.model_name}, target {describe(target)}",
        fitted_on=f"{len(fit)} samples in {len(fit.tokens)} sequences",
        judged_on=f"{len(samples)} samples in {len(samples.tokens)} sequences",
        score=estimate.score.name,
        baseline=estimate(result.clean),
        chance=estimate.chance,
        rows=(*(row(*item) for item in found.items()), *(random_row(name) for name in draws if n_draws)),
        n_draws=n_draws,
        perplexity=None if text is None else text_perplexity(model, text, batch_size=batch_size),
    )


def _hooks(core: Core, projection: Projection) -> dict[str, tuple[str, HookFunction]]:
    """Keep, remove and flip at every position, as hooks."""
    names = [f"{kind} hooked" for kind in INTERVENTIONS]

    def hook(name: str) -> HookFunction:
        def edit(activation: Tensor, hook: Any) -> Tensor:
            return dict(_edits(core, {"hooked": projection})(activation, torch.empty(0)))[name]

        return edit

    return {kind: (core.hook_point, hook(name)) for kind, name in zip(INTERVENTIONS, names, strict=True)}


def _edits(core: Core, projections: Mapping[str, Projection]) -> Edits:
    """Keep, remove and flip for each projection, about the core's mean."""
    interventions = {name: intervention(core, name) for name in INTERVENTIONS}

    def edits(activations: Tensor, index: Tensor) -> Iterator[tuple[str, Tensor]]:
        wide = activations.to(torch.promote_types(activations.dtype, torch.float32))
        deviation = wide - core.mean.to(wide)
        for name, projection in projections.items():
            inside = deviation @ projection.reads.to(wide) @ projection.writes.to(wide).T
            for kind, edit in interventions.items():
                yield f"{kind} {name}", (wide + edit.edit(deviation, inside)).to(activations.dtype)

    return edits


def _mean_kl(outside_kl: Mapping[str, Tensor], names: list[str]) -> dict[str, float]:
    if not outside_kl:
        return {}
    return {kind: float(torch.stack([outside_kl[f"{kind} {name}"] for name in names]).mean()) for kind in INTERVENTIONS}
