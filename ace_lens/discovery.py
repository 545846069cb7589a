"""From a task to a proven core in one call, with every choice made on other data than the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ace_lens.controls import Controls, compare_with_controls
from ace_lens.core import Core
from ace_lens.downstream import edited_outputs
from ace_lens.extraction import extract_cores
from ace_lens.models import HookedModel
from ace_lens.reports import Report
from ace_lens.samples import Samples
from ace_lens.scores import ACCURACY, CROSS_ENTROPY, Score, default_score
from ace_lens.targets import Target
from ace_lens.validation import Validation, validate


@dataclass(frozen=True)
class Proof(Report):
    """How a core was chosen, and what became of it on data that had no part in the choice.

    Arguments:
        hook_point: the hook point chosen.
        rank: the rank chosen.
        selection: for each hook point tried, the validation that it was chosen by.
        verdict: the validation of the chosen core on held-out samples, at its rank (the last) and every one below.
        controls: the core among controls on the same held-out samples; None if none were asked for.
    """

    hook_point: str
    rank: int
    selection: dict[str, Validation]
    verdict: Validation
    controls: Controls | None

    def __str__(self) -> str:
        parts = [f"Chosen among {len(self.selection)} hook points: {self.hook_point}, rank {self.rank}."]
        parts.append(str(self.verdict))
        if self.controls is not None:
            parts.append(str(self.controls))
        return "\n\n".join(parts)


def find_core(
    model: HookedModel,
    samples: Samples,
    target: Target,
    hook_points: str | Sequence[str],
    *,
    held_out: Samples,
    score: Score | None = None,
    max_rank: int = 8,
    sufficiency_tolerance: float = 0.01,
    controls: bool = True,
    text: Samples | None = None,
    generator: torch.Generator | None = None,
    batch_size: int = 64,
    progress: bool = False,
) -> tuple[Core, Proof]:
    """Find a task's core, and prove it.

    Half of the sequences in `samples` serve to extract a core at each hook point. On the other half each core is kept
    and removed at every rank; its rank is the smallest that is sufficient (if none is, the one that keeps most), and
    the hook point is the one where keeping and removing differ most at that rank. The verdict is taken on `held_out`,
    and so are controls, fitted on the half that served for extraction.

    Where accuracy is the score, cross-entropy makes the choice of rank: accuracy does not see a dimension that changes
    probabilities but no decision.

    Arguments:
        model: the model.
        samples: labelled samples to extract from and to choose on.
        target: the task output.
        hook_points: the hook points to choose from.
        held_out: other labelled samples, for the verdict.
        score: as for `validate`.
        max_rank: the highest rank to try.
        sufficiency_tolerance: see `Validation`.
        controls: compare the core with controls.
        text: ordinary text (`Samples.from_text`), to take the perplexity on as a side effect.
        generator: draws the split and the controls; seeded with 0 if not given.
        batch_size: rows in a forward pass.
        progress: show progress bars.

    Raises:
        ValueError: no hook points, held-out sequences among the samples, and as `extract_core` and `validate`.
    """
    hook_points = [hook_points] if isinstance(hook_points, str) else list(hook_points)
    if not hook_points:
        raise ValueError("There are no hook points to choose from. Give at least one, such as a resid_post a layer.")
    generator = generator or torch.Generator().manual_seed(0)
    extraction, selection = samples.split(0.5, generator)
    known = set(samples.contents())
    if shared := sum(content in known for content in held_out.contents()):
        raise ValueError(
            f"{shared} of the {len(held_out.tokens)} held-out sequences are among those to choose on, so the verdict "
            "would not be on other data. Split them first: samples.split(...)."
        )
    cores = extract_cores(model, extraction, target, hook_points, batch_size=batch_size, progress=progress)
    selection_score = score or _finest_score(model, selection, target, hook_points[0])
    tried = {
        name: validate(
            model,
            core,
            selection,
            target,
            selection_score,
            ranks=range(1, min(max_rank, core.rank) + 1),
            sufficiency_tolerance=sufficiency_tolerance,
            batch_size=batch_size,
            progress=progress,
        )
        for name, core in cores.items()
    }
    ranks = {name: _chosen_rank(validation) for name, validation in tried.items()}
    best = max(tried, key=lambda name: _selectivity(tried[name], ranks[name]))
    core = cores[best][: ranks[best]]
    chosen_on = f"{len(extraction)} samples (extraction) and {len(selection)} (layer and rank)"
    settings = {"generator": generator, "batch_size": batch_size, "progress": progress}
    tolerance = {"sufficiency_tolerance": sufficiency_tolerance}
    ranks_below = range(1, core.rank + 1)
    settings["text"] = text
    verdict = validate(
        model, core, held_out, target, score, ranks=ranks_below, chosen_on=chosen_on, **tolerance, **settings
    )
    compared = None
    if controls:
        compared = compare_with_controls(model, core, held_out, target, score, fit=extraction, **settings)
    return core, Proof(best, core.rank, tried, verdict, compared)


def _finest_score(model: HookedModel, samples: Samples, target: Target, hook_point: str) -> Score:
    """The default score, or cross-entropy in place of accuracy where labels number the outputs."""
    one = edited_outputs(model, samples[:1], target, hook_point, lambda activations, index: [])
    score = default_score(one.clean.shape[1], samples.labels)
    return CROSS_ENTROPY if score is ACCURACY else score


def _chosen_rank(validation: Validation) -> int:
    if validation.r_suf is not None:
        return validation.r_suf
    kept = [validation.progress(estimate) for estimate in validation.keep]
    return validation.ranks[kept.index(max(kept))]


def _selectivity(validation: Validation, rank: int) -> float:
    """How far apart keeping and removing put the task, on the way from chance to baseline."""
    index = validation.ranks.index(rank)
    return validation.progress(validation.keep[index]) - validation.progress(validation.remove[index])
