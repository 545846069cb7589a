"""From activations and Jacobians to a core, through triangular factors.

With H the centred activations `[n, d_model]` and J the stacked Jacobians `[n * target, d_model]`, the core is
read off the SVD of H J^T = U S V^T: the leading columns of U, taken back by H^T and orthonormalised in order.
H and J only enter through matrices with the same inner products of columns, R_H^T R_H = H^T H and
R_J^T R_J = J^T J (from H = Q_H R_H), because H J^T = Q_H (R_H R_J^T) Q_J^T and H^T U = R_H^T U'. Such factors
have at most d_model rows, can be built batch by batch, and merge exactly; nothing here is ever squared.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from ace_lens.core import Core, Provenance
from ace_lens.models import HookedModel
from ace_lens.probe import JacobianProbe, no_influence
from ace_lens.samples import Samples
from ace_lens.shapes import Activations, Jacobians, typed
from ace_lens.targets import Target, describe
from ace_lens.threads import threads_for


class _TriangularFactor:
    """Rows R with R^T R = X^T X for all rows X seen so far; never many more than twice d_model of them."""

    def __init__(self, d_model: int) -> None:
        self.d_model = d_model
        self._blocks: list[Tensor] = []
        self._n_rows = 0

    def append(self, rows: Tensor) -> None:
        self._blocks.append(rows)
        self._n_rows += len(rows)
        # Waiting until the factor has doubled makes the cost of re-triangularising proportional to the rows.
        if self._n_rows > 2 * self.d_model:
            self._blocks = [self.compact()]
            self._n_rows = len(self._blocks[0])

    def compact(self) -> Tensor:
        """The factor in at most d_model rows."""
        rows = torch.cat(self._blocks)
        if len(rows) <= self.d_model:
            return rows
        with threads_for(rows.numel()):
            return torch.linalg.qr(rows, mode="r").R


class CoreExtractor:
    """Builds a core from batches, in any order and any split; two extractors merge exactly.

    State, all float64 on the CPU: the number of samples, the running mean of the activations, the factor of the
    activations about that mean, the factor of the Jacobians, and the mean Jacobian.

    Arguments:
        hook_point: the name that the core will carry.
        provenance: what the core will say about its origin; the number of samples is filled in.
    """

    def __init__(self, hook_point: str, provenance: Provenance | None = None) -> None:
        self.hook_point = hook_point
        self.provenance = provenance or Provenance()
        self.n_samples = 0
        self._mean: Tensor
        self._mean_jacobian: Tensor
        self._reached: _TriangularFactor
        self._observed: _TriangularFactor

    @typed
    def update(self, activations: Activations, jacobians: Jacobians) -> "CoreExtractor":
        """Take in a batch: `[sample, d_model]` and `[sample, target, d_model]`, in any float dtype.

        Raises:
            ValueError: the batch is empty, a value is not finite, or its width or number of outputs is another than
                before.
        """
        jacobians = jacobians.detach().cpu().double()
        return self.update_factored(activations, jacobians.flatten(0, 1), jacobians.mean(0))

    @typed
    def update_factored(
        self,
        activations: Activations,
        factor: Float[Tensor, "row d_model"],
        mean_jacobian: Float[Tensor, "target d_model"],
    ) -> "CoreExtractor":
        """Take in a batch whose Jacobians are not there one by one.

        Arguments:
            activations: `[sample, d_model]`.
            factor: rows R `[row, d_model]` with R^T R = J^T J, for the stacked Jacobians J of the batch.
            mean_jacobian: `[target, d_model]`, their mean over samples.

        Raises:
            ValueError: as `update`.
        """
        if len(activations) == 0:
            raise ValueError("This batch has no samples. Leave empty batches out.")
        activations, mean_jacobian = (part.detach().cpu().double() for part in (activations, mean_jacobian))
        # A copy: the caller may use its buffers again.
        factor = factor.detach().to("cpu", torch.float64, copy=True)
        # In float64 a sum is finite where its terms are, and is found faster than which of them are.
        if not all(part.sum().isfinite() for part in (activations, factor, mean_jacobian)):
            raise ValueError(
                f"Activations or Jacobians at {self.hook_point} are NaN or infinite in the batch that follows sample "
                f"{self.n_samples}. Leave such samples out, or find what makes them so."
            )
        self._require_shape(mean_jacobian.shape)
        mean = activations.mean(0)
        self._absorb(len(activations), mean, activations - mean, factor, mean_jacobian)
        return self

    def merge(self, other: "CoreExtractor") -> "CoreExtractor":
        """Take in all that another extractor has seen; it is left as it is.

        Raises:
            ValueError: the other extractor is for another hook point, width or number of outputs.
        """
        if other.hook_point != self.hook_point:
            raise ValueError(
                f"Extractors for {self.hook_point} and {other.hook_point} do not merge: a core lives at one hook point."
            )
        if other.n_samples:
            self._require_shape(other._mean_jacobian.shape)
            self._absorb(
                other.n_samples, other._mean, other._reached.compact(), other._observed.compact(), other._mean_jacobian
            )
        return self

    def _require_shape(self, shape: torch.Size) -> None:
        if self.n_samples and self._mean_jacobian.shape != shape:
            raise ValueError(
                f"These Jacobians are [target, d_model] = {tuple(shape)}, earlier ones were "
                f"{tuple(self._mean_jacobian.shape)}. One extractor takes one target at one hook point."
            )

    def _absorb(self, n_samples: int, mean: Tensor, reached: Tensor, observed: Tensor, mean_jacobian: Tensor) -> None:
        """Add the factors of `n_samples` further samples.

        Each factor of H is centred about its own mean. About the common mean there is one more row between them,
        sqrt(n_a n_b / (n_a + n_b)) (mu_a - mu_b).
        """
        if not self.n_samples:
            self._mean, self._mean_jacobian = torch.zeros_like(mean), torch.zeros_like(mean_jacobian)
            self._reached, self._observed = _TriangularFactor(len(mean)), _TriangularFactor(len(mean))
        total = self.n_samples + n_samples
        shift = mean - self._mean
        if self.n_samples:
            self._reached.append((self.n_samples * n_samples / total) ** 0.5 * shift.unsqueeze(0))
        self._reached.append(reached)
        self._observed.append(observed)
        self._mean = self._mean + n_samples / total * shift
        self._mean_jacobian = self._mean_jacobian + n_samples / total * (mean_jacobian - self._mean_jacobian)
        self.n_samples = total

    def core(self, *, rank: int | None = None, energy: float | None = None) -> Core:
        """The core of what has been seen so far.

        Arguments:
            rank: its rank; or
            energy: the share of the squared singular values that it has to hold, in (0, 1]. With neither, all
                directions whose singular value rises above rounding.

        Each direction points to where the first target component grows, on average over the samples.

        Raises:
            ValueError: no samples, fewer samples than the rank, a zero Jacobian, activations that do not vary,
                or a rank beyond what rises above rounding.
        """
        if rank is not None and energy is not None:
            raise ValueError("Give a rank or an energy, not both.")
        if energy is not None and not 0 < energy <= 1:
            raise ValueError(f"An energy is a share in (0, 1], not {energy}.")
        if not self.n_samples:
            raise ValueError("No samples have been taken in: call update first.")
        if rank is not None and not 1 <= rank <= len(self._mean):
            raise ValueError(f"A rank is between 1 and d_model = {len(self._mean)}, not {rank}.")
        if rank is not None and self.n_samples < rank + 1:
            raise ValueError(
                f"{self.n_samples} samples cannot span a core of rank {rank}: about their mean they span at most "
                f"{self.n_samples - 1} dimensions. Give more samples."
            )
        reached, observed = self._reached.compact(), self._observed.compact()
        if not observed.any():
            raise ValueError(no_influence(self.provenance.target, [self.hook_point]))
        left, values, _ = torch.linalg.svd(reached @ observed.T, full_matrices=False)
        # What rounding makes of an exact zero, given the sizes of the two factors.
        noise = torch.linalg.matrix_norm(reached) * torch.linalg.matrix_norm(observed)
        supported = int((values > noise * torch.finfo(torch.float64).eps * max(reached.shape)).sum())
        if supported == 0:
            raise ValueError(
                f"The activations at {self.hook_point} do not vary along anything that the target reads, so there "
                "is no core. Give samples that differ in what the task is about."
            )
        values = values[:supported]
        if energy is not None:
            share = values.square().cumsum(0) / values.square().sum()
            # Rounding must not push a share of 1 out of reach.
            rank = int((share < energy - 1e-12).sum()) + 1
        rank = supported if rank is None else rank
        if rank > supported:
            raise ValueError(
                f"Only {supported} directions at {self.hook_point} are both varied by the samples and read by the "
                f"target; there is no core of rank {rank}. Ask for at most {supported}."
            )
        basis, _ = torch.linalg.qr(reached.T @ left[:, :rank])
        growth = self._mean_jacobian[0] @ basis
        return Core(
            basis=torch.where(growth < 0, -basis, basis),
            mean=self._mean.clone(),
            singular_values=values,
            hook_point=self.hook_point,
            provenance=replace(self.provenance, n_samples=self.n_samples),
        )


def core_extractors(
    model: HookedModel,
    samples: Samples,
    target: Target,
    hook_points: list[str],
    *,
    batch_size: int = 64,
    progress: bool = False,
) -> dict[str, CoreExtractor]:
    """An extractor at each of several hook points that has seen all samples: to merge, or to read cores off.

    Arguments and errors are those of `extract_core`.
    """
    probe = JacobianProbe(model, target, hook_points, batch_size=batch_size)
    extractors: dict[str, CoreExtractor] = {}
    for batch in probe.stream(samples, progress=progress):
        for name, found in batch.items():
            if name not in extractors:
                provenance = Provenance.of(
                    model,
                    dtype=str(found.activations.dtype).removeprefix("torch."),
                    target=describe(target),
                    prepend_bos=samples.prepend_bos,
                )
                extractors[name] = CoreExtractor(name, provenance)
            extractors[name].update(found.activations, found.jacobians)
    return extractors


def extract_cores(
    model: HookedModel,
    samples: Samples,
    target: Target,
    hook_points: list[str],
    *,
    rank: int | None = None,
    energy: float | None = None,
    batch_size: int = 64,
    progress: bool = False,
) -> dict[str, Core]:
    """A core at each of several hook points, from one pass over the samples.

    Arguments and errors are those of `extract_core`.
    """
    extractors = core_extractors(model, samples, target, hook_points, batch_size=batch_size, progress=progress)
    return {name: extractor.core(rank=rank, energy=energy) for name, extractor in extractors.items()}


def extract_core(
    model: HookedModel,
    samples: Samples,
    target: Target,
    hook_point: str,
    *,
    rank: int | None = None,
    energy: float | None = None,
    batch_size: int = 64,
    progress: bool = False,
) -> Core:
    """Extract the algorithmic core of a task at a hook point.

    Arguments:
        model: a model with TransformerLens hook points.
        samples: prompts, and a position in each.
        target: the task output: a `LogitMargin`, `CentredLogits`, or any callable from logits
            `[sample, d_vocab]` to `[sample, target]`.
        hook_point: a residual hook point, such as `blocks.10.hook_resid_post`.
        rank: the rank of the core; or
        energy: the share of the squared singular values that it has to hold. With neither, every direction
            above rounding: choose the rank causally then, with `validate`.
        batch_size: rows in a forward pass.
        progress: show a progress bar.

    Raises:
        ValueError: an unknown hook point, a target without influence, values that are not finite, or more rank
            than the samples or the target support.
        TypeError: an encoder, or a model that runs elsewhere.
    """
    cores = extract_cores(
        model,
        samples,
        target,
        [hook_point],
        rank=rank,
        energy=energy,
        batch_size=batch_size,
        progress=progress,
    )
    return next(iter(cores.values()))
