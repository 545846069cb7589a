"""Causal proof of a core: is it sufficient (keep), necessary (remove), and does flipping it flip the task?"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ace_lens.core import Core
from ace_lens.downstream import EditedOutputs, Edits, edited_outputs
from ace_lens.hooks import CoreIntervention, ProjectionAblator, SignFlipSteerer
from ace_lens.models import FwdHooks, HookedModel, run
from ace_lens.reports import Report
from ace_lens.samples import Samples
from ace_lens.scores import CROSS_ENTROPY, Score, default_score
from ace_lens.targets import Target, describe

INTERVENTIONS = ("keep", "remove", "flip")


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def from_draws(cls, value: float, draws: Tensor) -> "Estimate":
        """The value, with the percentile interval of its draws `[n]`; draws that are NaN are left out."""
        low, high = draws.double().nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return cls(value, low, high)

    def __format__(self, spec: str) -> str:
        """The value and the interval, each in the given format (three digits if none is given)."""
        spec = spec or ".3f"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


@dataclass(frozen=True)
class Validation(Report):
    """What interventions on a core do to a task, rank by rank.

    Arguments:
        description: what was intervened on, in words.
        chosen_on: the samples that the core was extracted from, in words.
        judged_on: the samples that the scores were taken on, in words.
        score: the score's name.
        higher_is_better: whether larger scores are better.
        baseline: the score without intervention.
        chance: the score of an answer that ignores the input; None where there is no such thing.
        ranks: the ranks tried, ascending.
        keep: the score with nothing but the core, for each rank.
        remove: the score with the core removed, for each rank.
        flip: the score with the core's sign flipped, for each rank.
        outside_kl: side effect: for "keep", "remove" and "flip", for each rank, the mean KL(unedited || edited) in nats
            over the tokens that the target does not read; empty unless there are two of them.
        perplexity: side effect: under "none" and each intervention at every position, for each rank, the perplexity on
            ordinary text; empty if no text was given.
        sufficiency_tolerance: how far below the baseline a sufficient core may stay, as a share of the way from chance
            to baseline.
        necessity_tolerance: how far above chance the task may stay without a necessary core, as such a share.
        restarted: whether the model was restarted at the hook point (else run in full for every intervention).
    """

    description: str
    chosen_on: str
    judged_on: str
    score: str
    higher_is_better: bool
    baseline: Estimate
    chance: float | None
    ranks: tuple[int, ...]
    keep: tuple[Estimate, ...]
    remove: tuple[Estimate, ...]
    flip: tuple[Estimate, ...]
    outside_kl: dict[str, tuple[float, ...]] = field(default_factory=dict)
    perplexity: dict[str, tuple[float, ...]] = field(default_factory=dict)
    sufficiency_tolerance: float = 0.01
    necessity_tolerance: float = 0.1
    restarted: bool = True

    def progress(self, estimate: Estimate) -> float:
        """Where a score lies on the way from chance (0) to baseline (1).

        Raises:
            ValueError: the score has no chance level, or the model is no better than it.
        """
        if self.chance is None:
            raise ValueError(
                f"The score {self.score!r} has no chance level, so it says nothing of sufficiency or necessity. Use a "
                "score with one, such as accuracy or cross-entropy."
            )
        if not self.above_chance:
            raise ValueError(
                f"Without intervention the model is not better than chance ({self.score} {self.baseline}, chance "
                f"{self.chance:.3f}): there is nothing to explain. If it is far on the other side, the labels are "
                "turned round."
            )
        return (estimate.value - self.chance) / (self.baseline.value - self.chance)

    @property
    def above_chance(self) -> bool:
        """Whether the whole interval of the baseline lies on the better side of chance."""
        if self.chance is None:
            return False
        return self.baseline.low > self.chance if self.higher_is_better else self.baseline.high < self.chance

    @property
    def r_suf(self) -> int | None:
        """The smallest rank that is sufficient; None if none tried is."""
        pairs = zip(self.ranks, self.keep, strict=True)
        enough = (rank for rank, kept in pairs if self.progress(kept) >= 1 - self.sufficiency_tolerance)
        return next(enough, None)

    @property
    def r_nec(self) -> int | None:
        """The smallest rank whose removal takes the task to chance; None if none tried does."""
        pairs = zip(self.ranks, self.remove, strict=True)
        gone = (rank for rank, removed in pairs if self.progress(removed) <= self.necessity_tolerance)
        return next(gone, None)

    @property
    def redundancy(self) -> int | None:
        """r_nec - r_suf: dimensions that carry the task again, beyond those that are enough for it."""
        if self.r_nec is None or self.r_suf is None:
            return None
        return self.r_nec - self.r_suf

    def __str__(self) -> str:
        chance = "" if self.chance is None else f", chance {self.chance:.3f}"
        lines = [
            self.description,
            f"chosen on {self.chosen_on}; judged on {self.judged_on}",
            f"{self.score}: baseline {self.baseline}{chance} (95% intervals)",
            f"{'rank':>4}  {'keep':<23}  {'remove':<23}  {'flip':<23}",
        ]
        for index, rank in enumerate(self.ranks):
            cells = (f"{getattr(self, name)[index]:.3f}" for name in INTERVENTIONS)
            lines.append(f"{rank:>4}  " + "  ".join(f"{cell:<23}" for cell in cells))
        for name, effects, spec in (
            ("KL outside the target", self.outside_kl, ".4f"),
            ("perplexity on text", self.perplexity, ".2f"),
        ):
            if effects:
                shown = (f"{which} {values[-1]:{spec}}" for which, values in effects.items())
                lines.append(f"side effect at rank {self.ranks[-1]}, {name}: {', '.join(shown)}")
        if self.chance is not None and not self.above_chance:
            lines.append("the model is not better than chance without intervention: there is nothing to explain")
        elif self.chance is not None and len(self.ranks) > 1:
            found = (
                f"no rank tried is {word}" if rank is None else f"{word} from rank {rank}"
                for word, rank in (("sufficient", self.r_suf), ("necessary", self.r_nec))
            )
            lines.append("; ".join(found))
        if not self.restarted:
            lines.append("(this model cannot be restarted at the hook point: every intervention was a full pass)")
        return "\n".join(line.rstrip() for line in lines)


def validate(
    model: HookedModel,
    core: Core,
    samples: Samples,
    target: Target,
    score: Score | None = None,
    *,
    ranks: Sequence[int] | None = None,
    centred: bool = True,
    text: Samples | None = None,
    chosen_on: str | None = None,
    sufficiency_tolerance: float = 0.01,
    necessity_tolerance: float = 0.1,
    n_bootstrap: int = 200,
    generator: torch.Generator | None = None,
    batch_size: int = 64,
    progress: bool = False,
) -> Validation:
    """Intervene on a core at each sample's own position, and score the task.

    All ranks together cost one pass of the model up to the hook point, and share the partial sums of their projections.

    Arguments:
        model: the model.
        core: the core.
        samples: labelled samples; not those that the core, its rank or its layer were chosen on.
        target: the task output.
        score: by default ROC AUC for one output with labels 0 and 1, accuracy for several.
        ranks: the ranks to try; by default the core's own.
        centred: intervene about the core's mean rather than about zero.
        text: ordinary text, labelled with next tokens (`Samples.from_text`), to take the perplexity on.
        chosen_on: the samples that the core, its rank and its layer were chosen on, in words; by default those that the
            core says it was extracted from.
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
    ranks = [core.rank] if ranks is None else sorted({int(rank) for rank in ranks})
    if not ranks or ranks[0] < 1 or ranks[-1] > core.rank:
        raise ValueError(f"This core has ranks 1 to {core.rank}; it cannot be tried at {ranks or 'no rank at all'}.")
    result = edited_outputs(
        model,
        samples,
        target,
        core.hook_point,
        rank_sweep(core, ranks, centred=centred),
        batch_size=batch_size,
        progress=progress,
    )
    estimate = Bootstrap(score, samples, result, n_bootstrap, generator)
    scores = {name: estimate(outputs) for name, outputs in result.edited.items()}
    perplexity = {}
    if text is not None:
        perplexity["none"] = (text_perplexity(model, text, batch_size=batch_size),)
        for name in INTERVENTIONS:
            hooks = (intervention(core[:rank], name, centred=centred).fwd_hooks() for rank in ranks)
            perplexity[name] = tuple(text_perplexity(model, text, each, batch_size=batch_size) for each in hooks)
    return Validation(
        description=f"Core at {core.hook_point} of {core.provenance.model_name}, target {describe(target)}",
        chosen_on=chosen_on or f"{core.provenance.n_samples} samples",
        judged_on=f"{len(samples)} samples in {len(samples.tokens)} sequences",
        score=estimate.score.name,
        higher_is_better=estimate.score.higher_is_better,
        baseline=estimate(result.clean),
        chance=estimate.chance,
        ranks=tuple(ranks),
        keep=tuple(scores[f"keep {rank}"] for rank in ranks),
        remove=tuple(scores[f"remove {rank}"] for rank in ranks),
        flip=tuple(scores[f"flip {rank}"] for rank in ranks),
        outside_kl={
            name: tuple(float(result.outside_kl[f"{name} {rank}"].mean()) for rank in ranks)
            for name in (INTERVENTIONS if result.outside_kl else ())
        },
        perplexity=perplexity,
        sufficiency_tolerance=sufficiency_tolerance,
        necessity_tolerance=necessity_tolerance,
        restarted=result.restarted,
    )


def intervention(core: Core, name: str, *, centred: bool = True) -> CoreIntervention:
    """The hook function called "keep", "remove" or "flip"."""
    if name == "flip":
        return SignFlipSteerer(core, centred=centred)
    return ProjectionAblator(core, "keep" if name == "keep" else "remove", centred=centred)


def rank_sweep(
    core: Core, ranks: Sequence[int], names: Sequence[str] = INTERVENTIONS, *, centred: bool = True
) -> Edits:
    """Keep, remove and flip (or some of them) at each of several ascending ranks, named as "keep 3".

    Each rank adds its own directions to the projection of the rank before.
    """
    interventions = {name: intervention(core, name, centred=centred) for name in names}

    def edits(activations: Tensor, index: Tensor) -> Iterator[tuple[str, Tensor]]:
        wide = activations.to(torch.promote_types(activations.dtype, torch.float32))
        basis, mean = core.basis.to(wide), core.mean.to(wide)
        deviation = wide - mean if centred else wide
        coordinates = deviation @ basis
        projection = torch.zeros_like(wide)
        previous = 0
        for rank in ranks:
            projection = projection + coordinates[:, previous:rank] @ basis[:, previous:rank].T
            previous = rank
            for name, edit in interventions.items():
                yield f"{name} {rank}", (wide + edit.edit(deviation, projection)).to(activations.dtype)

    return edits


@torch.no_grad()
def text_perplexity(model: HookedModel, text: Samples, fwd_hooks: FwdHooks = (), *, batch_size: int = 64) -> float:
    """Perplexity of the next token on ordinary text, with hooks: exp of the mean cross-entropy.

    Arguments:
        model: the model.
        text: samples labelled with the token that comes next (`Samples.from_text`).
        fwd_hooks: hook functions for every pass.
        batch_size: rows in a forward pass.

    Raises:
        ValueError: the samples have no labels.
    """
    if text.labels is None:
        raise ValueError("Text for perplexity is labelled with its next tokens: make it with Samples.from_text(...).")
    losses = []
    for index, batch in text.batches(batch_size):
        logits = batch.at(run(model, batch.tokens, batch.attention_mask, fwd_hooks))
        losses.append(CROSS_ENTROPY.function(logits, text.labels[index].to(logits.device), logits))
    return math.exp(float(torch.cat(losses).mean()))


class Resampler:
    """Draws whole sequences with replacement, the same draws for everything that is resampled.

    Samples of one sequence are not independent, so they are drawn together; and every condition is resampled alike, so
    that differences between conditions are not blurred.

    Arguments:
        samples: the samples.
        n_resamples: how many draws.
        generator: makes the draws; seeded with 0 if not given.
    """

    def __init__(self, samples: Samples, n_resamples: int, generator: torch.Generator | None) -> None:
        n_sequences = len(samples.tokens)
        generator = generator or torch.Generator().manual_seed(0)
        draws = torch.randint(n_sequences, (n_resamples, n_sequences), generator=generator)
        # All draws are counted at once, each in a range of its own.
        apart = (draws + n_sequences * torch.arange(n_resamples)[:, None]).flatten()
        self._counts = apart.bincount(minlength=n_resamples * n_sequences).unflatten(0, draws.shape).double()
        self._sequence = samples.sequence
        self._n_drawn = self._counts @ self._sequence.bincount(minlength=n_sequences).double()

    def mean(self, values: Tensor) -> Estimate:
        """The mean of one value a sample, `[sample]`, with its interval."""
        values = values.double()
        totals = torch.zeros_like(self._counts[0]).index_add_(0, self._sequence, values)
        return Estimate.from_draws(float(values.mean()), self._counts @ totals / self._n_drawn)

    @property
    def times_drawn(self) -> Tensor:
        """`[draw, sample]`, how often each sample is in each draw."""
        return self._counts[:, self._sequence].long()

    def drawn(self) -> Iterator[Tensor]:
        """The samples in each draw, as indices, some of them several times."""
        for counts in self.times_drawn:
            yield torch.arange(len(self._sequence)).repeat_interleave(counts)


class Bootstrap:
    """Scores with 95% percentile intervals, resampling whole sequences.

    Arguments:
        score: the score, or None for the one that fits the samples and outputs.
        samples: the samples.
        result: their outputs.
        n_resamples: how often the sequences are resampled.
        generator: draws the resamples; seeded with 0 if not given.

    Raises:
        ValueError: no score fits, or labels are missing.
    """

    def __init__(
        self,
        score: Score | None,
        samples: Samples,
        result: EditedOutputs,
        n_resamples: int,
        generator: torch.Generator | None,
    ) -> None:
        self.score = score or default_score(result.clean.shape[1], samples.labels)
        if self.score.needs_labels and samples.labels is None:
            raise ValueError(f"The score {self.score.name!r} compares outputs with labels, but the samples have none.")
        self._labels = torch.zeros(len(samples)) if samples.labels is None else samples.labels
        if problem := self.score.check(result.clean, self._labels.to(result.clean.device)):
            raise ValueError(f"The score {self.score.name!r} does not fit: {problem}.")
        self._clean = result.clean
        self._resampler = Resampler(samples, n_resamples, generator)

    @property
    def chance(self) -> float | None:
        """The score of an answer that ignores the input."""
        return None if self.score.chance is None else self.score.chance(self._labels)

    def __call__(self, outputs: Tensor) -> Estimate:
        """The score of these outputs.

        Raises:
            ValueError: the score is undefined on the samples.
        """
        values = self.values(outputs)
        if values.isnan().any():
            raise ValueError(
                f"The score {self.score.name!r} is undefined on these samples. ROC AUC, for one, needs samples with "
                "label 1 and samples with label 0."
            )
        if values.ndim:
            return self._resampler.mean(values)
        labels = self._labels.to(outputs.device)
        if self.score.resampled is not None:
            resampled = self.score.resampled(outputs, labels, self._resampler.times_drawn)
        else:
            resampled = torch.stack(
                [
                    self.score.function(outputs[index], labels[index], self._clean[index]).double().cpu()
                    for index in (drawn.to(outputs.device) for drawn in self._resampler.drawn())
                ]
            )
        # A resample of few sequences may leave a score undefined, such as ROC AUC when it drew one label only.
        return Estimate.from_draws(float(values), resampled)

    def over_draws(self, draws: list[Tensor]) -> Estimate:
        """The mean score of several outputs, with the interval over them instead of over sequences."""
        scores = torch.stack([self.values(outputs).mean() for outputs in draws])
        return Estimate.from_draws(float(scores.mean()), scores)

    def values(self, outputs: Tensor) -> Tensor:
        """The score's values, one a sample or a single one, without an interval."""
        return self.score.function(outputs, self._labels.to(outputs.device), self._clean).double().cpu()
