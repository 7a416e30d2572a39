"""What all records have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NonNegative = Annotated[int, Field(ge=0)]


class Record(BaseModel):
    """Base of all records: frozen, unknown keys refused, never NaN or infinity in JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
