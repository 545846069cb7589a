"""Where in a model a core does its work: keep, remove and flip at every layer, from one pass over the samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ace_lens.core import Core, check_cores
from ace_lens.downstream import EditedOutputs, edited_at_each
from ace_lens.extraction import CoreExtractor, core_extractors
from ace_lens.models import HookedModel
from ace_lens.reports import Report
from ace_lens.samples import Samples
from ace_lens.scores import Score
from ace_lens.targets import Target, describe
from ace_lens.validation import INTERVENTIONS, Bootstrap, Estimate, rank_sweep


@dataclass(frozen=True)
class LayerSweep(Report):
    """What interventions on a core do to a task, layer by layer.

    Arguments:
        description: what was intervened on, in words.
        chosen_on: the samples that the cores were extracted from, in words.
        judged_on: the samples that the scores were taken on, in words.
        score: the score's name.
        higher_is_better: whether larger scores are better.
        baseline: the score without intervention.
        chance: the score of an answer that ignores the input; None where there is no such thing.
        hook_points: where a core was tried.
        ranks: the rank of the core at each of them.
        keep: the score with nothing but the core, for each of them.
        remove: the score with the core removed, for each of them.
        flip: the score with the core's sign flipped, for each of them.
        restarted: whether the model was restarted at the hook points (else run in full for every intervention).
    """

    description: str
    chosen_on: str
    judged_on: str
    score: str
    higher_is_better: bool
    baseline: Estimate
    chance: float | None
    hook_points: tuple[str, ...]
    ranks: tuple[int, ...]
    keep: tuple[Estimate, ...]
    remove: tuple[Estimate, ...]
    flip: tuple[Estimate, ...]
    restarted: bool = True

    def __str__(self) -> str:
        chance = "" if self.chance is None else f", chance {self.chance:.3f}"
        width = max(map(len, ("hook point", *self.hook_points)))
        titles = "  ".join(f"{title:<20}" for title in ("none", *INTERVENTIONS))
        lines = [
            self.description,
            f"chosen on {self.chosen_on}; judged on {self.judged_on}",
            f"{self.score}{chance} (95% intervals)",
            f"{'hook point':<{width}}  rank  {titles}",
        ]
        for index, hook_point in enumerate(self.hook_points):
            scores = (self.baseline, *(getattr(self, name)[index] for name in INTERVENTIONS))
            cells = "  ".join(f"{f'{score:.3f}':<20}" for score in scores)
            lines.append(f"{hook_point:<{width}}  {self.ranks[index]:>4}  {cells}")
        if not self.restarted:
            lines.append("(this model cannot be restarted at every hook point: there, interventions were full passes)")
        return "\n".join(line.rstrip() for line in lines)


def sweep_layers(
    model: HookedModel,
    cores: Mapping[str, Core],
    samples: Samples,
    target: Target,
    score: Score | None = None,
    *,
    n_bootstrap: int = 200,
    generator: torch.Generator | None = None,
    batch_size: int = 64,
    progress: bool = False,
) -> LayerSweep:
    """Keep, remove and flip a core at each of several layers, and score the task.

    Interventions act at each sample's own position, about the core's mean. What stands before the samples runs once for
    all layers and interventions.

    Arguments:
        model: the model.
        cores: a core for each hook point, such as `extract_cores` gives.
        samples: labelled samples; not those that the cores were extracted from, nor those to choose a layer on if the
            layer chosen is to be judged.
        target: the task output.
        score: as for `validate`.
        n_bootstrap: how often the sequences are resampled for the intervals.
        generator: draws the resamples; seeded with 0 if not given.
        batch_size: rows in a forward pass.
        progress: show a progress bar.

    Raises:
        ValueError: no cores, a core that stands under another hook point than its own or does not fit the model, or
            labels are missing.
    """
    check_cores(model, cores)
    edits = {name: rank_sweep(core, [core.rank]) for name, core in cores.items()}
    results = edited_at_each(
        model, samples, target, edits, side_effects=False, batch_size=batch_size, progress=progress
    )
    sources = {(core.provenance.model_name, core.provenance.n_samples) for core in cores.values()}
    return _swept(
        Bootstrap(score, samples, next(iter(results.values())), n_bootstrap, generator),
        results,
        cores,
        description=f"Cores of {', '.join(sorted({name for name, _ in sources}))}, target {describe(target)}",
        chosen_on=f"{', '.join(sorted({str(n) for _, n in sources}))} samples",
        judged_on=f"{len(samples)} samples in {len(samples.tokens)} sequences",
    )


def crossfit_layers(
    model: HookedModel,
    samples: Samples,
    target: Target,
    hook_points: Sequence[str],
    folds: Sequence[int] | Tensor,
    score: Score | None = None,
    *,
    rank: int = 1,
    n_bootstrap: int = 200,
    generator: torch.Generator | None = None,
    batch_size: int = 64,
    progress: bool = False,
) -> tuple[dict[str, Core], LayerSweep]:
    """A core at each of several layers, and a sweep that may choose among them on the same samples.

    In the sweep every sample is judged with cores whose directions come from the other folds; the cores that are
    returned come from all samples. All of them act about the mean of all samples, which sees no label, so that folds in
    which labels are not as frequent as elsewhere do no harm. Each sample is probed once: extractors of the folds are
    merged. Where what is judged in the end differs from the samples in some respect (other words, other sentences), let
    folds differ in the same.

    Arguments:
        model: the model.
        samples: labelled samples.
        target: the task output.
        hook_points: the layers, such as a resid_post a block.
        folds: `[sample]`, the fold that each sample belongs to; two folds or more.
        score: as for `validate`.
        rank: the rank of the cores.
        n_bootstrap: how often the sequences are resampled for the intervals.
        generator: draws the resamples; seeded with 0 if not given.
        batch_size: rows in a forward pass.
        progress: show a progress bar.

    Raises:
        ValueError: no hook points, folds that are not one a sample, fewer than two of them, a sequence that stands in
            two folds, labels are missing, and as `extract_core`.
    """
    if not hook_points:
        raise ValueError("There are no hook points to try. Give at least one, such as a resid_post a layer.")
    if samples.labels is None:
        raise ValueError("Layers are compared by a score of outputs against labels, but the samples have none.")
    parts = _parts(samples, torch.as_tensor(folds).cpu())
    options = {"batch_size": batch_size, "progress": progress}
    seen = [core_extractors(model, samples[part], target, list(hook_points), **options) for part in parts]
    cores = _merged_cores(seen, rank)
    results = []
    for fold, part in enumerate(parts):
        others = _merged_cores([each for other, each in enumerate(seen) if other != fold], rank)
        edits = {name: rank_sweep(replace(core, mean=cores[name].mean), [rank]) for name, core in others.items()}
        results.append(edited_at_each(model, samples[part], target, edits, side_effects=False, **options))
    undo = torch.cat(parts).argsort()
    joined = {name: _joined([result[name] for result in results], undo) for name in cores}
    sweep = _swept(
        Bootstrap(score, samples, next(iter(joined.values())), n_bootstrap, generator),
        joined,
        cores,
        description=f"Cores of {next(iter(cores.values())).provenance.model_name}, target {describe(target)}",
        chosen_on=f"cores of the other {len(parts) - 1} of {len(parts)} folds",
        judged_on=f"{len(samples)} samples in {len(samples.tokens)} sequences, fold by fold",
    )
    return cores, sweep


def _parts(samples: Samples, folds: Tensor) -> list[Tensor]:
    """The samples of each fold, as indices."""
    if folds.shape != (len(samples),):
        raise ValueError(f"{len(samples)} samples have one fold each, but the folds are {list(folds.shape)}.")
    parts = [(folds == fold).nonzero()[:, 0] for fold in folds.unique()]
    if len(parts) < 2:
        raise ValueError("There is one fold only, so nothing is left to extract cores from. Give two folds or more.")
    contents = samples.contents()
    inside = [{contents[row] for row in samples.sequence[part].unique().tolist()} for part in parts]
    if sum(map(len, inside)) != len(set().union(*inside)):
        raise ValueError(
            "A sequence stands in two folds, so that cores would be judged on sequences that they come from. Give all "
            "samples of a sequence, and equal sequences, the same fold."
        )
    return parts


def _merged_cores(seen: Sequence[Mapping[str, CoreExtractor]], rank: int) -> dict[str, Core]:
    """The cores of all that several extractors have seen; they are left as they are."""
    cores = {}
    for name, first in seen[0].items():
        merged = CoreExtractor(name, first.provenance)
        for extractors in seen:
            merged.merge(extractors[name])
        cores[name] = merged.core(rank=rank)
    return cores


def _joined(results: Sequence[EditedOutputs], undo: Tensor) -> EditedOutputs:
    """The outputs of all folds, in the order of the samples."""
    edited = {name: torch.cat([result.edited[name] for result in results])[undo] for name in results[0].edited}
    clean = torch.cat([result.clean for result in results])[undo]
    return EditedOutputs(clean, edited, restarted=all(result.restarted for result in results))


def _swept(
    estimate: Bootstrap,
    results: Mapping[str, EditedOutputs],
    cores: Mapping[str, Core],
    *,
    description: str,
    chosen_on: str,
    judged_on: str,
) -> LayerSweep:
    def scores(intervention: str) -> tuple[Estimate, ...]:
        return tuple(estimate(results[name].edited[f"{intervention} {core.rank}"]) for name, core in cores.items())

    return LayerSweep(
        description=description,
        chosen_on=chosen_on,
        judged_on=judged_on,
        score=estimate.score.name,
        higher_is_better=estimate.score.higher_is_better,
        baseline=estimate(next(iter(results.values())).clean),
        chance=estimate.chance,
        hook_points=tuple(cores),
        ranks=tuple(core.rank for core in cores.values()),
        keep=scores("keep"),
        remove=scores("remove"),
        flip=scores("flip"),
        restarted=all(result.restarted for result in results.values()),
    )
