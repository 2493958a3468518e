"""What every settings class has in common."""

import re
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Typed settings: an unknown key or a wrong type is refused, nothing is coerced, nothing changes later.

    The line under each field is its documentation: it appears in `docs/settings.md` and in error messages.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def matching(pattern: str, meaning: str) -> Callable[[str], str]:
    """A check for text settings that says in words what is wanted."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"must be {meaning}, but it is {value!r}")
        return value

    return check
