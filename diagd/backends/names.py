"""Names of number types and backends."""

from typing import Literal

DTypeName = Literal["float32", "bfloat16", "float16", "int8"]
DTypeChoice = Literal["auto", "fastest", "float32", "bfloat16", "float16", "int8"]
Backend = Literal[
    "auto", "native", "eager", "compile", "cuda-graph", "triton", "compiled-graph", "webgpu"
]
