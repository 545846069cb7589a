"""Find, prove and steer algorithmic cores of transformers, in any TransformerLens session.

The road, each step a module: samples -> targets -> probe -> extraction -> core -> hooks -> validation ->
identification, comparison.
"""

from ace_lens.comparison import canonical_correlations, overlap, weight_cosine
from ace_lens.core import Core, Provenance
from ace_lens.downstream import EditedOutputs, edited_outputs
from ace_lens.extraction import CoreExtractor, extract_core, extract_cores
from ace_lens.hooks import CoreHook, CoreIntervention, ProjectionAblator, SignFlipSteerer
from ace_lens.identification import LinearOperator, fit_operator, match_eigenvalues, oracle_r2
from ace_lens.models import HookedModel, attached
from ace_lens.positions import Positions
from ace_lens.probe import JacobianProbe, Probed
from ace_lens.samples import Samples
from ace_lens.scores import ACCURACY, CROSS_ENTROPY, KL, MEAN_MARGIN, ROC_AUC, Score
from ace_lens.targets import CentredLogits, LogitMargin, Target
from ace_lens.validation import Estimate, Validation, validate

__all__ = [
    "ACCURACY",
    "CROSS_ENTROPY",
    "KL",
    "MEAN_MARGIN",
    "ROC_AUC",
    "CentredLogits",
    "Core",
    "CoreExtractor",
    "CoreHook",
    "CoreIntervention",
    "EditedOutputs",
    "Estimate",
    "HookedModel",
    "JacobianProbe",
    "LinearOperator",
    "LogitMargin",
    "Positions",
    "Probed",
    "ProjectionAblator",
    "Provenance",
    "Samples",
    "Score",
    "SignFlipSteerer",
    "Target",
    "Validation",
    "attached",
    "canonical_correlations",
    "edited_outputs",
    "extract_core",
    "extract_cores",
    "fit_operator",
    "match_eigenvalues",
    "oracle_r2",
    "overlap",
    "validate",
    "weight_cosine",
]
