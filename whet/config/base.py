"""The one base class of everything that can be configured."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Frozen, typed, without unknown keys; numbers must be finite. A component is a Config with one verb."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)
