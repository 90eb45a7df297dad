"""How new weights reach the generator and how their arrival is proven."""

from pydantic import Field

from whet.config import Config


class WeightSyncConfig(Config):
    """Both proofs run after every publication; a mismatch stops the run and names the tensors."""

    digest: bool = True
    """Compare a digest of every tensor the generator holds with the learner's."""
    probe: bool = True
    """Compare log-probs of a few tokens, through the generator's decode path, with the learner's."""
    probe_tokens: int = Field(8, gt=0)
    """Length of the probe."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest mean difference of log-probs; by default 1e-3 where generator and learner compute in float32 or finer,
    0.25 where one of them computes in bfloat16."""
