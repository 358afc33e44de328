"""Initial weights of a table's rows: `shardam.init.Normal(mean=0, std=1)` and its relatives."""

from __future__ import annotations

from shardam_proto.schema import Constant, Initializer, Normal, Uniform, XavierNormal, XavierUniform

__all__ = ["Normal", "Uniform", "Constant", "XavierUniform", "XavierNormal", "Initializer"]
