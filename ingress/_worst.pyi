"""Built by cffi from core/; what it holds is declared in core/api.h."""

from typing import Any

ffi: Any
lib: Any
