"""Causal proof of a core: is it sufficient (keep), necessary (remove), and does flipping it flip the task?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ace_lens.core import Core
from ace_lens.downstream import edited_outputs
from ace_lens.hooks import CoreIntervention, ProjectionAblator, SignFlipSteerer
from ace_lens.models import HookedModel
from ace_lens.samples import Samples
from ace_lens.scores import Score, default_score
from ace_lens.targets import Target, describe


@dataclass(frozen=True)
class Estimate:
    """A score with its 95% bootstrap interval."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        spec = spec or ".3f"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


@dataclass(frozen=True)
class Validation:
    """What interventions on a core do to a task, rank by rank.

    Arguments:
        score: the score's name; `higher_is_better` says which way the task is done better.
        higher_is_better: whether larger scores are better.
        baseline: the score without intervention.
        chance: the score of an answer that ignores the input; None where there is no such thing.
        ranks: the ranks tried, ascending.
        keep: the score with nothing but the core, for each rank.
        remove: the score with the core removed, for each rank.
        flip: the score with the core's sign flipped, for each rank.
        n_samples: how many samples the scores were taken on.
        sufficiency_tolerance: how far below the baseline a sufficient core may stay, as a share of the way
            from chance to baseline.
        necessity_tolerance: how far above chance the task may stay without a necessary core, as such a share.
        restarted: whether the model was restarted at the hook point (else run in full for every
            intervention).
        description: what was intervened on, in words.
    """

    score: str
    higher_is_better: bool
    baseline: Estimate
    chance: float | None
    ranks: tuple[int, ...]
    keep: tuple[Estimate, ...]
    remove: tuple[Estimate, ...]
    flip: tuple[Estimate, ...]
    n_samples: int
    sufficiency_tolerance: float
    necessity_tolerance: float
    restarted: bool
    description: str

    def _progress(self, estimate: Estimate) -> float:
        """Where a score lies on the way from chance (0) to baseline (1)."""
        if self.chance is None:
            raise ValueError(
                f"The score {self.score!r} has no chance level, so it says nothing of sufficiency or necessity. "
                "Use a score with one, such as accuracy or cross-entropy."
            )
        return (estimate.value - self.chance) / (self.baseline.value - self.chance)

    @property
    def r_suf(self) -> int | None:
        """The smallest rank that is sufficient; None if none tried is."""
        pairs = zip(self.ranks, self.keep, strict=True)
        enough = (rank for rank, kept in pairs if self._progress(kept) >= 1 - self.sufficiency_tolerance)
        return next(enough, None)

    @property
    def r_nec(self) -> int | None:
        """The smallest rank whose removal takes the task to chance; None if none tried does."""
        pairs = zip(self.ranks, self.remove, strict=True)
        gone = (rank for rank, removed in pairs if self._progress(removed) <= self.necessity_tolerance)
        return next(gone, None)

    @property
    def redundancy(self) -> int | None:
        """r_nec - r_suf: dimensions that carry the task again, beyond those that are enough for it."""
        if self.r_nec is None or self.r_suf is None:
            return None
        return self.r_nec - self.r_suf

    def __str__(self) -> str:
        header = f"{'rank':>6}  {'keep':^24}  {'remove':^24}  {'flip':^24}"
        rows = [
            f"{rank:>6}  {keep!s:^24}  {remove!s:^24}  {flip!s:^24}"
            for rank, keep, remove, flip in zip(
                self.ranks,
                *(map(format, part) for part in (self.keep, self.remove, self.flip)),
                strict=True,
            )
        ]
        chance = "" if self.chance is None else f", chance {self.chance:.3f}"
        lines = [
            self.description,
            f"{self.score} on {self.n_samples} samples: baseline {self.baseline:.3f}{chance} (95% intervals)",
            header,
            *rows,
        ]
        if self.chance is not None and len(self.ranks) > 1:
            lines.append(f"sufficient from rank {self.r_suf}, necessary from rank {self.r_nec}")
        if not self.restarted:
            lines.append("(this model cannot be restarted at the hook point: every intervention was a full pass)")
        return "\n".join(lines)


def validate(
    model: HookedModel,
    core: Core,
    samples: Samples,
    target: Target,
    score: Score | None = None,
    *,
    ranks: Sequence[int] | None = None,
    centred: bool = True,
    sufficiency_tolerance: float = 0.01,
    necessity_tolerance: float = 0.1,
    n_bootstrap: int = 200,
    generator: torch.Generator | None = None,
    batch_size: int = 64,
    progress: bool = False,
) -> Validation:
    """Intervene on a core at each sample's own position, and score the task.

    Arguments:
        model: the model.
        core: the core.
        samples: labelled samples; not those that the core, its rank or its layer were chosen on.
        target: the task output.
        score: by default ROC AUC for one output with labels 0 and 1, accuracy for several.
        ranks: the ranks to try; by default the core's own.
        centred: intervene about the core's mean rather than about zero.
        sufficiency_tolerance: see `Validation`.
        necessity_tolerance: see `Validation`.
        n_bootstrap: how often the sequences are resampled for the intervals.
        generator: draws the resamples; seeded with 0 if not given.
        batch_size: rows in a forward pass.
        progress: show a progress bar.

    Raises:
        ValueError: the core does not fit the model, a rank is beyond the core's, or labels are missing.
    """
    core.check_model(model)
    ranks = [core.rank] if ranks is None else sorted(ranks)
    interventions: dict[str, CoreIntervention] = {}
    for rank in ranks:
        interventions[f"keep {rank}"] = ProjectionAblator(core[:rank], "keep", centred=centred)
        interventions[f"remove {rank}"] = ProjectionAblator(core[:rank], "remove", centred=centred)
        interventions[f"flip {rank}"] = SignFlipSteerer(core[:rank], centred=centred)
    result = edited_outputs(
        model,
        samples,
        target,
        core.hook_point,
        {name: intervention.apply for name, intervention in interventions.items()},
        batch_size=batch_size,
        progress=progress,
    )
    score = score or default_score(result.clean.shape[1], samples.labels)
    if score.needs_labels and samples.labels is None:
        raise ValueError(f"The score {score.name!r} compares outputs with labels, but the samples have none.")
    estimate = _Bootstrap(score, samples, result.clean, n_bootstrap, generator)
    scores = {name: estimate(outputs) for name, outputs in result.edited.items()}
    return Validation(
        score=score.name,
        higher_is_better=score.higher_is_better,
        baseline=estimate(result.clean),
        chance=None if score.chance is None else score.chance(estimate.labels),
        ranks=tuple(ranks),
        keep=tuple(scores[f"keep {rank}"] for rank in ranks),
        remove=tuple(scores[f"remove {rank}"] for rank in ranks),
        flip=tuple(scores[f"flip {rank}"] for rank in ranks),
        n_samples=len(samples),
        sufficiency_tolerance=sufficiency_tolerance,
        necessity_tolerance=necessity_tolerance,
        restarted=result.restarted,
        description=f"Core at {core.hook_point} of {core.provenance.model_name}, target {describe(target)}",
    )


class _Bootstrap:
    """Scores with 95% percentile intervals, resampling whole sequences.

    Samples of one sequence are not independent, so they are drawn together; and every condition is resampled
    alike, so that differences between them are not blurred.
    """

    def __init__(
        self,
        score: Score,
        samples: Samples,
        clean: Tensor,
        n_resamples: int,
        generator: torch.Generator | None,
    ) -> None:
        self.score = score
        self.labels = torch.zeros(len(samples)) if samples.labels is None else samples.labels
        self.clean = clean
        self._sequence = samples.sequence
        n_sequences = len(samples.tokens)
        generator = generator or torch.Generator().manual_seed(0)
        draws = torch.randint(n_sequences, (n_resamples, n_sequences), generator=generator)
        self._counts = torch.stack([draw.bincount(minlength=n_sequences) for draw in draws])

    def __call__(self, outputs: Tensor) -> Estimate:
        values = self.score.function(outputs, self.labels.to(outputs.device), self.clean).double().cpu()
        if values.isnan().any():
            raise ValueError(
                f"The score {self.score.name!r} is undefined on these samples. ROC AUC, for one, needs samples with "
                "label 1 and samples with label 0."
            )
        if values.ndim:
            weights = self._counts[:, self._sequence].double()
            resampled = weights @ values / weights.sum(1)
        else:
            resampled = torch.stack([self._resampled(outputs, counts) for counts in self._counts])
        # A resample of few sequences may leave a score undefined, such as ROC AUC when it drew one label only.
        low, high = resampled.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return Estimate(float(values.mean()), low, high)

    def _resampled(self, outputs: Tensor, counts: Tensor) -> Tensor:
        index = torch.arange(len(self._sequence)).repeat_interleave(counts[self._sequence]).to(outputs.device)
        labels = self.labels.to(outputs.device)
        return self.score.function(outputs[index], labels[index], self.clean[index]).double().cpu()
