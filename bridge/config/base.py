"""What every settings class has in common."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Typed settings: an unknown key or a wrong type is refused, nothing is coerced, nothing changes later.

    The line under each field is its documentation: it appears in `docs/settings.md` and in error messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
