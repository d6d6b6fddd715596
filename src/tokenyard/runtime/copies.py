"""What copies are of objects that belong to one process, or to one Buffer."""

from __future__ import annotations

from typing import Any, NoReturn


class Once:
    """Its copy is the object itself: a copied model uses the same connections and memory."""

    def __deepcopy__(self, memo: object = None) -> Any:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle a {type(self).__name__}, which belongs to this process")
