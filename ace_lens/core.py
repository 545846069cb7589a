"""The artefact: an algorithmic core, with what is needed to use it again and to know where it came from."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ace_lens.models import HookedModel, canonical_hook_point, resolve_hook_point, weight_processing
from ace_lens.shapes import Basis, Mean, typed

_FORMAT = "ace_lens.core/1"


@dataclass(frozen=True)
class Provenance:
    """Where a core came from.

    Arguments:
        model_name: the model's own name, such as "gpt2".
        model_class: the class it was loaded into.
        processing: the weight processing that its residual stream had (see `weight_processing`).
        dtype: the dtype of the activations that it was extracted from.
        target: the task output that it explains.
        n_samples: how many samples it was extracted from.
        prepend_bos: whether prompts began with a begin token; None where that is not known.
        versions: the libraries in use, by name.
    """

    model_name: str = "unknown"
    model_class: str = "unknown"
    processing: dict[str, Any] = field(default_factory=dict)
    dtype: str = "unknown"
    target: str = "unknown"
    n_samples: int = 0
    prepend_bos: bool | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: HookedModel, **rest: Any) -> "Provenance":
        """The provenance of a core found in `model`, with the running versions of the libraries."""
        return cls(
            model_name=str(getattr(getattr(model, "cfg", None), "model_name", "unknown")),
            model_class=type(model).__name__,
            processing=weight_processing(model),
            versions={name: version(name) for name in ("ace-lens", "transformer-lens", "torch")},
            **rest,
        )


@typed
@dataclass(frozen=True, eq=False)
class Core:
    """An algorithmic core: an ordered orthonormal basis of a subspace of the residual stream.

    Arguments:
        basis: `[d_model, rank]`, orthonormal columns, most important first; `core[:r]` is the core of rank r.
        mean: `[d_model]`, the mean activation over the samples; interventions act about it.
        singular_values: all singular values of H J^T that rise above rounding, largest first; there may be
            more of them than the rank.
        hook_point: the TransformerLens name of the hook point that the core lives at.
        provenance: where it came from.

    Raises:
        ValueError: the basis is not orthonormal, or something in it is not finite.
    """

    basis: Basis
    mean: Mean
    singular_values: Float[Tensor, "n_values"]
    hook_point: str
    provenance: Provenance = field(default_factory=Provenance)

    def __post_init__(self) -> None:
        if not (self.basis.isfinite().all() and self.mean.isfinite().all()):
            raise ValueError("A core's basis and mean must be finite.")
        gram = self.basis.double().T @ self.basis.double()
        tolerance = 10 * self.d_model * torch.finfo(self.basis.dtype).eps
        if not torch.allclose(gram, torch.eye(self.rank, dtype=gram.dtype, device=gram.device), atol=tolerance):
            raise ValueError(
                "A core's basis must have orthonormal columns. Orthonormalise it first, with torch.linalg.qr."
            )

    @property
    def rank(self) -> int:
        """Dimensions of the core."""
        return self.basis.shape[1]

    @property
    def d_model(self) -> int:
        """Width of the residual stream that it lives in."""
        return self.basis.shape[0]

    @property
    def energy(self) -> Tensor:
        """Share of the squared singular values in the first 1, 2, ... directions, up to 1."""
        squares = self.singular_values.square()
        return squares.cumsum(0) / squares.sum()

    def __getitem__(self, ranks: slice) -> "Core":
        """`core[:r]`: the leading `r` dimensions, which are the core of rank r."""
        if not isinstance(ranks, slice) or ranks.start not in (None, 0) or ranks.step not in (None, 1):
            raise TypeError("A core is nested from its first dimension on: take core[:r].")
        if ranks.stop is not None and not 1 <= ranks.stop <= self.rank:
            raise ValueError(f"This core has ranks 1 to {self.rank}; there is no rank {ranks.stop} in it.")
        return replace(self, basis=self.basis[:, : ranks.stop])

    @typed
    def coordinates(self, activations: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch rank"]:
        """Core coordinates z = Q^T (h - mu), in the wider of the two dtypes."""
        dtype = torch.promote_types(activations.dtype, self.basis.dtype)
        basis, mean = (part.to(activations.device, dtype) for part in (self.basis, self.mean))
        return (activations.to(dtype) - mean) @ basis

    def to(self, *args: Any, **kwargs: Any) -> "Core":
        """The core on another device, or in another float dtype, as `torch.Tensor.to`."""
        moved = (part.to(*args, **kwargs) for part in (self.basis, self.mean, self.singular_values))
        return replace(self, **dict(zip(("basis", "mean", "singular_values"), moved, strict=True)))

    def check_model(self, model: HookedModel) -> None:
        """Make sure that the core means in `model` what it meant where it came from.

        Raises:
            ValueError: the model lacks the hook point, has another width, or has had its weights processed
                differently.
        """
        resolve_hook_point(model, self.hook_point)
        self._check_width(getattr(getattr(model, "cfg", None), "d_model", self.d_model))
        name = "writing_weights_centred"
        here, there = weight_processing(model)[name], self.provenance.processing.get(name)
        if None not in (here, there) and here != there:
            raise ValueError(
                f"The core comes from a model whose weights were processed differently ({name}: {there} there, {here} "
                "here), so its residual stream is another one. Load the model as it was, or extract the core again."
            )

    def check_activation(self, activation: Tensor, hook_point: str | None) -> None:
        """Make sure that an activation handed to a hook is of the residual stream that the core lives in.

        Raises:
            ValueError: another hook point, or another width.
        """
        if hook_point is not None and (put_on := canonical_hook_point(hook_point)) != self.hook_point:
            raise ValueError(
                f"The core was extracted at {self.hook_point}, but the hook was put on {put_on}. "
                "The two residual streams differ; put it on core.hook_point."
            )
        self._check_width(activation.shape[-1])

    def _check_width(self, width: int) -> None:
        if width != self.d_model:
            raise ValueError(
                f"The core lives in a residual stream of width {self.d_model}, but this one has width {width}. "
                "A core only fits models of the width that it was extracted from."
            )

    def save(self, path: str | Path) -> None:
        """Write the core as one safetensors file, with its provenance as JSON metadata."""
        tensors = {
            name: getattr(self, name).detach().cpu().contiguous().clone()
            for name in ("basis", "mean", "singular_values")
        }
        metadata = {
            "format": _FORMAT,
            "core": json.dumps({"hook_point": self.hook_point, "provenance": asdict(self.provenance)}),
        }
        save_file(tensors, str(path), metadata)

    @classmethod
    def load(cls, path: str | Path) -> "Core":
        """Read a core that `save` wrote. Nothing in the file is executed.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a core, is damaged, or was written by a newer format.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no core at {path}.")
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is not a readable safetensors file ({error}). It is damaged, or not a core."
            ) from error
        if metadata.get("format") != _FORMAT:
            raise ValueError(
                f"{path} is a safetensors file, but not a core of this format ({_FORMAT}; found "
                f"{metadata.get('format')!r}). Cores are written by Core.save."
            )
        try:
            description = json.loads(metadata["core"])
            return cls(
                **{name: tensors[name] for name in ("basis", "mean", "singular_values")},
                hook_point=description["hook_point"],
                provenance=Provenance(**description["provenance"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} claims to be a core, but is damaged: {error}") from error

    def __repr__(self) -> str:
        share = f"{100 * float(self.energy[min(self.rank, len(self.energy)) - 1]):.2f}% of energy"
        source = self.provenance
        return (
            f"Core(rank {self.rank} of {self.d_model}, {share}, at {self.hook_point} of {source.model_name}; "
            f"target {source.target}; {source.n_samples} samples)"
        )


def check_cores(model: HookedModel, cores: Mapping[str, Core]) -> None:
    """Make sure that there are cores, each under the name of its own hook point, and that all fit the model.

    Raises:
        ValueError: it is not so.
    """
    if not cores:
        raise ValueError("There are no cores to try. Give one a hook point, as extract_cores does.")
    for name, core in cores.items():
        if core.hook_point != name:
            raise ValueError(f"The core given for {name} lives at {core.hook_point}. Name it by core.hook_point.")
        core.check_model(model)
