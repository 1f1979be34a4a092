"""Steps compiled whole by `torch.compile`, one shape at a time.

Compiled code stays with the code of a function, for ever, and the ninth shape of a function is an
error. Here every shape gets a function of its own, and what was compiled goes when that one goes.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch


def compile_for_one_shape(function: FunctionType) -> Callable[..., None]:
    """Return a function that does the same, compiled when it is called for the first time.

    It is to be called with one shape only. Nothing of a call's arguments is kept.

    Returns:
        what raises ValueError, in one line, where it cannot be compiled.
    """
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    compiled: Callable[..., None] = torch.compile(  # pyright: ignore[reportUnknownMemberType]
        own, fullgraph=True, dynamic=False, options={"triton.cudagraphs": False}
    )

    def run(*arguments: Any) -> None:
        from torch._dynamo.exc import TorchDynamoException  # here, for it takes a second

        try:
            compiled(*arguments)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)  # of whatever compiles
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            raise ValueError(
                f"torch.compile cannot compile a step here ({reason}): "
                "choose a backend that does not compile, such as cuda-graph"
            ) from None

    return run
