"""The shapes that travel through the pipeline, and the decorator that checks them at run time.

Dimension names are those of TransformerLens: `batch` (rows of a forward pass), `pos` (positions in a
sequence), `d_model`, `d_vocab`. Ours are `sample` (one prompt and one position in it), `target` (components
of the task's output) and `rank` (dimensions of a core).
"""

from typing import TypeAlias

from beartype import beartype
from jaxtyping import Bool, Float, Int, jaxtyped
from torch import Tensor

Tokens: TypeAlias = Int[Tensor, "batch pos"]
PositionMask: TypeAlias = Bool[Tensor, "batch pos"]
Residual: TypeAlias = Float[Tensor, "batch pos d_model"]

SampleIndex: TypeAlias = Int[Tensor, "sample"]
SampleLogits: TypeAlias = Float[Tensor, "sample d_vocab"]
Outputs: TypeAlias = Float[Tensor, "sample target"]
Activations: TypeAlias = Float[Tensor, "sample d_model"]
Jacobians: TypeAlias = Float[Tensor, "sample target d_model"]

Mean: TypeAlias = Float[Tensor, "d_model"]
Basis: TypeAlias = Float[Tensor, "d_model rank"]

typed = jaxtyped(typechecker=beartype)
"""Checks a function's (or a dataclass's) annotated types and shapes whenever it is called."""
